// Matrices in few bits as they lie in a GGUF file, and their rows' products with activations of 8 bits.
//
// Each format gives the codes of 32 numbers at a time, a `SLICE`, and for each group of numbers a step and a lowest number:
// a number is step * code + low. Activations have a step per slice, so a product is of integers within it, and
//     sum w x = sum over groups of (step * own step) * sum of codes * own codes + low * (own step * sum of own codes).

#pragma once

#include <vector>

#include "numbers.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DPBUSD _mm256_dpbusd_epi32
#elif defined(__AVXVNNI__)
#define DPBUSD _mm256_dpbusd_avx_epi32
#endif

namespace {

constexpr int SLICE = 32, STRETCH = 8; // numbers, and slices whose steps are read together
constexpr i64 AHEAD_BYTES = 2048;        // of a row, read ahead of its products
typedef uint8_t half_codes __attribute__((vector_size(16)));
typedef uint8_t codes_u8 __attribute__((vector_size(32)));
typedef int8_t codes_i8 __attribute__((vector_size(32)));
typedef uint8_t eight_u8 __attribute__((vector_size(8)));
typedef int8_t eight_i8 __attribute__((vector_size(8)));
typedef int32_t eight_i32 __attribute__((vector_size(32)));
typedef float eight_f32 __attribute__((vector_size(32)));

template <class V> inline V at(const void *p) {
    V out;
    memcpy(&out, p, sizeof out);
    return out;
}
inline float half(const uint8_t *p) { return number(at<f16>(p)); }

// ---- formats ---------------------------------------------------------------------------------------------------------

inline codes_u8 joined(half_codes a, half_codes b) {
#if defined(__AVX2__)
    return (codes_u8)_mm256_set_m128i((__m128i)b, (__m128i)a);
#else
    half_codes parts[2] = {a, b};
    return at<codes_u8>(parts);
#endif
}
inline codes_u8 nibbles(const uint8_t *p) { // low halves of 16 bytes, then their high halves
    half_codes x = at<half_codes>(p);
#if defined(__AVX2__)
    asm("" : "+x"(x)); // read once
#endif
    return joined(x & 15, x >> 4);
}
struct Pair { codes_u8 first, last; }; // of two slices: the first 16 codes of both, and the last 16
inline Pair nibbles(const uint8_t *a, const uint8_t *b) {
    codes_u8 x = joined(at<half_codes>(a), at<half_codes>(b));
    return {x & 15, x >> 4};
}
typedef uint32_t eight_u32 __attribute__((vector_size(32)));
#define EIGHT(i) i, i, i, i, i, i, i, i
// Of 32 bytes, 16 where the first byte's first bit is set, the next one's second, ...
inline codes_u8 sixteens(codes_u8 x) {
    const codes_u8 each = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return (codes_u8)((x & each) == each) & 16;
}
inline codes_u8 fifth(const uint8_t *p) { // bits of four bytes, where a code has its fifth
    codes_u8 x = (codes_u8)(at<uint32_t>(p) - eight_u32{});
    return sixteens(__builtin_shuffle(x, codes_u8{EIGHT(0), EIGHT(1), EIGHT(18), EIGHT(19)}));
}
inline Pair fifths(const uint8_t *a, const uint8_t *b) {
    typedef uint32_t four_u32 __attribute__((vector_size(16)));
    codes_u8 x = joined((half_codes)(at<uint32_t>(a) - four_u32{}), (half_codes)(at<uint32_t>(b) - four_u32{}));
    return {sixteens(__builtin_shuffle(x, codes_u8{EIGHT(0), EIGHT(1), EIGHT(16), EIGHT(17)})),
            sixteens(__builtin_shuffle(x, codes_u8{EIGHT(2), EIGHT(3), EIGHT(18), EIGHT(19)}))};
}
#undef EIGHT
inline Pair operator|(Pair a, Pair b) { return {a.first | b.first, a.last | b.last}; }

// Float16 numbers that are `each` bytes apart.
inline eight_f32 halves(const uint8_t *p, int each) {
#if defined(__AVX2__) && defined(__F16C__)
    auto of = [&](int i) { return at<int16_t>(p + i * each); };
    return (eight_f32)_mm256_cvtph_ps(_mm_setr_epi16(of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)));
#else
    eight_f32 out;
    for (int i = 0; i < 8; i++) out[i] = half(p + i * each);
    return out;
#endif
}
// Steps and lowest numbers of eight blocks, which begin with both.
inline void two_halves(const uint8_t *p, int each, eight_f32 &step, eight_f32 &low) {
#if defined(__AVX2__) && defined(__F16C__)
    auto of = [&](int i) { return at<int32_t>(p + i * each); };
    auto four = [&](int i) { return _mm256_cvtph_ps(_mm_setr_epi32(of(i), of(i + 1), of(i + 4), of(i + 5))); }; // step, low, step, ...
    __m256 a = four(0), b = four(2);
    step = (eight_f32)_mm256_shuffle_ps(a, b, 0x88), low = (eight_f32)_mm256_shuffle_ps(a, b, 0xdd);
#else
    step = halves(p, each), low = halves(p + 2, each);
#endif
}
template <class V> inline void put(void *to, const V &v) { memcpy(to, &v, sizeof v); }

// `codes(block, i)`: of slice i. `steps(block, step, low)`: of its groups, `eight(..)`: of eight blocks of one slice.
// `pair(a, b)`: codes of two blocks, where they are PAIRED. MAX: the largest code. SIGNED: codes are int8, and there are no lowest
// numbers. FROM: the lowest number is -FROM steps; 0: it has a number of its own.
template <int NBYTES, int LARGEST, int FROM> struct Slices {
    static constexpr int BLOCK = 32, BYTES = NBYTES, GROUP = 32, MAX = LARGEST, SIGNED = LARGEST == 128, PAIRED = !SIGNED;
    static void steps(const uint8_t *b, float *step, float *low) {
        *step = half(b), *low = SIGNED ? 0 : FROM ? -FROM * *step : half(b + 2);
    }
    static void eight(const uint8_t *b, eight_f32 &step, eight_f32 &low) {
        if (SIGNED || FROM) step = halves(b, BYTES), low = step * float(-FROM);
        else two_halves(b, BYTES, step, low);
    }
};
struct Q8_0 : Slices<34, 128, 0> {
    static codes_u8 codes(const uint8_t *b, int) { return at<codes_u8>(b + 2); }
};
struct Q4_0 : Slices<18, 15, 8> {
    static codes_u8 codes(const uint8_t *b, int) { return nibbles(b + 2); }
    static Pair pair(const uint8_t *a, const uint8_t *b) { return nibbles(a + 2, b + 2); }
};
struct Q4_1 : Slices<20, 15, 0> {
    static codes_u8 codes(const uint8_t *b, int) { return nibbles(b + 4); }
    static Pair pair(const uint8_t *a, const uint8_t *b) { return nibbles(a + 4, b + 4); }
};
struct Q5_0 : Slices<22, 31, 16> {
    static codes_u8 codes(const uint8_t *b, int) { return nibbles(b + 6) | fifth(b + 2); }
    static Pair pair(const uint8_t *a, const uint8_t *b) { return nibbles(a + 6, b + 6) | fifths(a + 2, b + 2); }
};
struct Q5_1 : Slices<24, 31, 0> {
    static codes_u8 codes(const uint8_t *b, int) { return nibbles(b + 8) | fifth(b + 4); }
    static Pair pair(const uint8_t *a, const uint8_t *b) { return nibbles(a + 8, b + 8) | fifths(a + 4, b + 4); }
};

inline eight_f32 floats_of(uint32_t first, uint32_t rest) { // of eight bytes
    uint64_t both = first | uint64_t(rest) << 32;
#if defined(__AVX2__)
    return (eight_f32)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(both))));
#else
    return __builtin_convertvector(at<eight_u8>(&both), eight_f32);
#endif
}
// Steps and lowest numbers of eight groups: six bits each, in 12 bytes. The first eight hold four of each, and above them the two
// highest bits of the other four, whose low bits are the rest.
inline void six_bits(const uint8_t *b, float *step, float *low) {
    uint32_t s = at<uint32_t>(b + 4), l = at<uint32_t>(b + 8), rest = at<uint32_t>(b + 12);
    constexpr uint32_t SIX = 0x3f3f3f3f, FOUR = 0x0f0f0f0f, TWO = 0x30303030;
    eight_f32 steps = floats_of(s & SIX, (rest & FOUR) | (s >> 2 & TWO)) * half(b);
    eight_f32 lows = floats_of(l & SIX, (rest >> 4 & FOUR) | (l >> 2 & TWO)) * -half(b + 2);
    put(step, steps), put(low, lows);
}
struct Q4_K {
    static constexpr int BLOCK = 256, BYTES = 144, GROUP = 32, MAX = 15, SIGNED = false, PAIRED = false;
    static codes_u8 codes(const uint8_t *b, int i) {
        codes_u8 x = at<codes_u8>(b + 16 + i / 2 * 32);
        return i % 2 ? x >> 4 : x & 15;
    }
    static void steps(const uint8_t *b, float *step, float *low) { six_bits(b, step, low); }
};
struct Q5_K {
    static constexpr int BLOCK = 256, BYTES = 176, GROUP = 32, MAX = 31, SIGNED = false, PAIRED = false;
    static codes_u8 codes(const uint8_t *b, int i) {
        const uint8_t own = uint8_t(1 << i);
        codes_u8 x = at<codes_u8>(b + 48 + i / 2 * 32), bit = own - codes_u8{};
        return (i % 2 ? x >> 4 : x & 15) | ((codes_u8)((at<codes_u8>(b + 16) & bit) == bit) & 16);
    }
    static void steps(const uint8_t *b, float *step, float *low) { six_bits(b, step, low); }
};
struct Q6_K {
    static constexpr int BLOCK = 256, BYTES = 210, GROUP = 16, MAX = 63, SIGNED = false, PAIRED = false;
    static codes_u8 codes(const uint8_t *b, int i) { // four slices of each half of a block share bytes
        codes_u8 low = at<codes_u8>(b + i / 4 * 64 + i % 2 * 32), high = at<codes_u8>(b + 128 + i / 4 * 32);
        low = i % 4 < 2 ? low & 15 : low >> 4;
        high = i % 4 == 0 ? high << 4 : i % 4 == 1 ? high << 2 : i % 4 == 2 ? high : high >> 2;
        return low | (high & 48);
    }
    static void steps(const uint8_t *b, float *step, float *low) {
        for (int g = 0; g < 16; g += 8) {
#if defined(__AVX2__)
            eight_f32 steps = (eight_f32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(at<int64_t>(b + 192 + g))));
#else
            eight_f32 steps = __builtin_convertvector(at<eight_i8>(b + 192 + g), eight_f32);
#endif
            steps *= half(b + 208);
            put(step + g, steps), put(low + g, steps * -32.0f);
        }
    }
};

template <class F> constexpr i64 row_bytes(i64 K) { return K / F::BLOCK * F::BYTES; }

// A row's K numbers.
template <class F> void unpack_row(const uint8_t *w, i64 K, float *out) {
    constexpr int slices = F::BLOCK / SLICE, groups = F::BLOCK / F::GROUP;
    for (; K > 0; K -= F::BLOCK, w += F::BYTES) {
        float step[groups], low[groups];
        F::steps(w, step, low);
        for (int i = 0; i < slices; i++, out += SLICE) {
            codes_u8 codes = F::codes(w, i);
            for (int j = 0; j < SLICE; j++) {
                int g = (i * SLICE + j) / F::GROUP;
                out[j] = step[g] * float(F::SIGNED ? int(int8_t(codes[j])) : int(codes[j])) + low[g];
            }
        }
    }
}

// ---- activations -----------------------------------------------------------------------------------------------------

inline eight_f32 eight_numbers(const float *p) { return at<eight_f32>(p); }
inline eight_f32 eight_numbers(const bf16 *p) {
    typedef uint16_t eight_u16 __attribute__((vector_size(16)));
    return (eight_f32)(__builtin_convertvector(at<eight_u16>(p), eight_u32) << 16);
}
#if defined(__AVX2__) && defined(__FMA__)
inline codes_i8 bytes_of(const eight_i32 *x) { // of four vectors of numbers that bytes hold
    __m256i words[2];
    UNROLL for (int i = 0; i < 2; i++) words[i] = _mm256_packs_epi32((__m256i)x[2 * i], (__m256i)x[2 * i + 1]);
    return (codes_i8)_mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline void totals_of(eight_i32 a, eight_i32 b, int32_t *out) {
    __m256i pairs = _mm256_hadd_epi32((__m256i)a, (__m256i)b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    put(out, _mm_cvtsi128_si64(_mm_hadd_epi32(four, four)));
}
inline bool is_zero(eight_f32 x) { return !_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_setzero_ps(), _CMP_NEQ_UQ)); }
inline float greatest(eight_f32 x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
#else
inline codes_i8 bytes_of(const eight_i32 *x) {
    codes_i8 out;
    for (int i = 0; i < SLICE; i++) out[i] = int8_t(x[i / 8][i % 8]);
    return out;
}
inline void totals_of(eight_i32 a, eight_i32 b, int32_t *out) { out[0] = total(a, 0), out[1] = total(b, 0); }
inline bool is_zero(eight_f32 x) { return total(x, 0.0f) == 0; }
inline float greatest(eight_f32 x) {
    float out = 0;
    for (int i = 0; i < 8; i++) out = std::max(out, x[i]);
    return out;
}
#endif

// Rows [N, K] in 8 bits, with a step for each slice: finer than llama.cpp's for formats of blocks of 256, which share one there.
struct Activations {
    i64 K = 0;
    std::vector<int8_t> codes;                        // [N, K]
    std::vector<int8_t> paired;                       // [N, K]: of each STRETCH, slices i and i + 4 as in a `Pair`
    std::vector<float> steps, sums, steps16, sums16;  // [N, K / 32], and for formats of smaller groups [N, K / 16]

    void resize(i64 N, i64 columns) {
        K = columns;
        if (i64(codes.size()) >= N * K) return;
        codes.resize(N * K), paired.resize(N * K), steps.resize(N * K / 32), sums.resize(N * K / 32);
        steps16.resize(N * K / 16), sums16.resize(N * K / 16);
    }
    template <class A> void take(const A *x, i64 n) { // row n
        for (i64 slice = 0, g = n * K / SLICE; slice < K / SLICE; slice++, g++, x += SLICE) {
            eight_f32 parts[4], most = {}, odd = {}; // odd: NaN where a number is infinite or none
            UNROLL for (int i = 0; i < 4; i++) {
                parts[i] = eight_numbers(x + 8 * i);
                eight_f32 size = (eight_f32)((eight_u32)parts[i] & 0x7fffffff);
                most = size > most ? size : most, odd += parts[i] * 0;
            }
            const bool finite = is_zero(odd);
            float largest = greatest(most), step = finite ? largest / 127 : NAN;
            float by = largest > 1e-30f ? 127 / largest : 0; // 127 / 1e-30 is finite
            eight_i32 near[4] = {};
            if (finite) // others are no integers
                UNROLL for (int i = 0; i < 4; i++) // to the nearest, ties to even
                    near[i] = __builtin_convertvector((parts[i] * by + 12582912.0f) - 12582912.0f, eight_i32);
            put(&codes[g * SLICE], bytes_of(near));
            int32_t sum[2];
            totals_of(near[0] + near[1], near[2] + near[3], sum);
            steps[g] = steps16[2 * g] = steps16[2 * g + 1] = step;
            sums16[2 * g] = step * float(sum[0]), sums16[2 * g + 1] = step * float(sum[1]), sums[g] = step * float(sum[0] + sum[1]);
        }
        for (i64 k = 0; k + STRETCH * SLICE <= K; k += STRETCH * SLICE)
            for (int i = 0; i < STRETCH; i++)
                for (int half = 0; half < 2; half++)
                    memcpy(&paired[n * K + k + i % 4 * 64 + half * 32 + i / 4 * 16], &codes[n * K + k + i * SLICE + half * 16], 16);
    }
    template <int GROUP> const float *steps_of(i64 n) const { return (GROUP == 16 ? steps16 : steps).data() + n * K / GROUP; }
    template <int GROUP> const float *sums_of(i64 n) const { return (GROUP == 16 ? sums16 : sums).data() + n * K / GROUP; }
};

// ---- a row with a few rows of activations ----------------------------------------------------------------------------

#if defined(__AVX2__) && defined(__FMA__)
inline eight_f32 added(eight_f32 sum, eight_f32 a, eight_f32 b, int) { return (eight_f32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }
// Sums of four neighbours' products. No sum of two leaves 16 bits: codes are at most 128, and own codes 127.
template <bool SIGNED> inline eight_i32 dot(codes_u8 codes, codes_i8 own) {
    __m256i a = (__m256i)codes, b = (__m256i)own;
    if constexpr (SIGNED) b = _mm256_sign_epi8(b, a), a = _mm256_abs_epi8(a);
#if defined(DPBUSD)
    return (eight_i32)DPBUSD(_mm256_setzero_si256(), a, b);
#else
    return (eight_i32)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
#endif
}
#else
inline eight_f32 added(eight_f32 sum, eight_f32 a, eight_f32 b, int) { return sum + a * b; }
template <bool SIGNED> inline eight_i32 dot(codes_u8 codes, codes_i8 own) {
    eight_i32 out = {};
    for (int i = 0; i < SLICE; i++) out[i / 4] += (SIGNED ? int(int8_t(codes[i])) : int(codes[i])) * own[i];
    return out;
}
#endif
// Sums of four products of a pair's first slice in the first four lanes, of its second in the others.
inline eight_i32 dot(const Pair &codes, codes_i8 first, codes_i8 last) {
#if defined(DPBUSD)
    return (eight_i32)DPBUSD(DPBUSD(_mm256_setzero_si256(), (__m256i)codes.first, (__m256i)first), (__m256i)codes.last, (__m256i)last);
#elif defined(__AVX2__) && defined(__FMA__)
    // Codes of 5 bits at most: no sum of four leaves 16 bits.
    __m256i sum = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)codes.first, (__m256i)first), _mm256_maddubs_epi16((__m256i)codes.last, (__m256i)last));
    return (eight_i32)_mm256_madd_epi16(sum, _mm256_set1_epi16(1));
#else
    return dot<false>(codes.first, first) + dot<false>(codes.last, last);
#endif
}

// Steps of a slice's groups in the lanes of its sums.
template <int GROUP> inline eight_f32 spread(const float *steps, int slice) {
    if constexpr (GROUP == 32) return steps[slice] - eight_f32{};
    float a = steps[2 * slice], b = steps[2 * slice + 1];
    return eight_f32{a, a, a, a, b, b, b, b};
}

template <int M> struct RowSums { eight_f32 codes[M][2], lows[M]; float rest[M]; };

// The next SLICES slices of a row, from number `k` on, with rows [n, n + M) of the activations.
template <class F, int SLICES, int M> inline void add_stretch(const uint8_t *w, const Activations &x, i64 n, i64 k, RowSums<M> &to) {
    constexpr int groups = SLICES * SLICE / F::GROUP, slices = F::BLOCK / SLICE;
    alignas(32) float step[groups], low[groups], scaled[M][groups];
    if constexpr (SLICES == STRETCH && slices == 1) {
        eight_f32 own, lowest;
        F::eight(w, own, lowest);
        put(step, own), put(low, lowest);
    }
    else F::steps(w, step, low);
    UNROLL for (int m = 0; m < M; m++) {
        const float *steps = x.steps_of<F::GROUP>(n + m) + k / F::GROUP, *sums = x.sums_of<F::GROUP>(n + m) + k / F::GROUP;
        if constexpr (groups % 8) {
            scaled[m][0] = *step * *steps;
            if (!F::SIGNED) to.rest[m] += *low * *sums;
        } else {
            UNROLL for (int g = 0; g < groups; g += 8) {
                put(scaled[m] + g, at<eight_f32>(step + g) * at<eight_f32>(steps + g));
                if (!F::SIGNED) to.lows[m] = added(to.lows[m], at<eight_f32>(low + g), at<eight_f32>(sums + g), 0);
            }
        }
        asm("" : "+m"(scaled[m])); // in memory, from where each is spread by a load
    }
    UNROLL for (int i = 0; i < SLICES; i++) {
        codes_u8 codes = F::codes(w + i / slices * F::BYTES, i % slices);
        UNROLL for (int m = 0; m < M; m++) {
            eight_i32 sum = dot<F::SIGNED>(codes, at<codes_i8>(x.codes.data() + (n + m) * x.K + k + i * SLICE));
            to.codes[m][i % 2] = added(to.codes[m][i % 2], __builtin_convertvector(sum, eight_f32), spread<F::GROUP>(scaled[m], i), 0);
        }
    }
}

// The next STRETCH slices of a row whose slices are multiplied in pairs.
template <class F, int M> inline void add_pairs(const uint8_t *w, const Activations &x, i64 n, i64 k, RowSums<M> &to) {
    eight_f32 step, low, scaled[M];
    F::eight(w, step, low);
    UNROLL for (int m = 0; m < M; m++) {
        scaled[m] = step * at<eight_f32>(x.steps.data() + ((n + m) * x.K + k) / SLICE);
        to.lows[m] = added(to.lows[m], low, at<eight_f32>(x.sums.data() + ((n + m) * x.K + k) / SLICE), 0);
    }
    UNROLL for (int i = 0; i < STRETCH / 2; i++) {
        Pair codes = F::pair(w + i * F::BYTES, w + (i + 4) * F::BYTES);
        const eight_i32 both = {i, i, i, i, i + 4, i + 4, i + 4, i + 4};
        UNROLL for (int m = 0; m < M; m++) {
            const int8_t *own = x.paired.data() + (n + m) * x.K + k + i * 2 * SLICE;
            eight_i32 sum = dot(codes, at<codes_i8>(own), at<codes_i8>(own + SLICE));
            to.codes[m][i % 2] = added(to.codes[m][i % 2], __builtin_convertvector(sum, eight_f32), __builtin_shuffle(scaled[m], both), 0);
        }
    }
}

template <class F, int M> inline void row_product(const uint8_t *w, const Activations &x, i64 n, float *out) {
    constexpr i64 bytes = STRETCH * SLICE / F::BLOCK * F::BYTES;
    RowSums<M> sums = {};
    i64 k = 0;
    for (; k + STRETCH * SLICE <= x.K; k += STRETCH * SLICE, w += bytes) {
        for (int line = 0; line < bytes; line += 64) __builtin_prefetch(w + AHEAD_BYTES + line);
        if constexpr (F::PAIRED) add_pairs<F>(w, x, n, k, sums);
        else add_stretch<F, STRETCH, M>(w, x, n, k, sums);
    }
    if constexpr (F::BLOCK == SLICE)
        for (; k < x.K; k += SLICE, w += F::BYTES) add_stretch<F, 1, M>(w, x, n, k, sums);
    UNROLL for (int m = 0; m < M; m++) {
        eight_f32 all = sums.codes[m][0] + sums.codes[m][1] + sums.lows[m];
        out[m] = total(all, 0.0f) + sums.rest[m];
    }
}

// Rows [first, end) of a matrix with N rows of activations, into columns of `y [N, stride]` or added to them. `type` of the bias.
template <class F>
void rows_of(const uint8_t *w, const void *bias, i64 type, i64 first, i64 end, const Activations &x, i64 N, float *y, i64 stride, bool add) {
    for (i64 row = first; row < end; row++) {
        const uint8_t *own = w + row * row_bytes<F>(x.K);
        float more = !bias ? 0 : type == 16 ? number(((const bf16 *)bias)[row]) : ((const float *)bias)[row];
        float out[4];
        for (i64 n = 0, some; n < N; n += some) {
            some = N - n >= 4 ? 4 : N - n >= 2 ? 2 : 1;
            (some == 4 ? row_product<F, 4> : some == 2 ? row_product<F, 2> : row_product<F, 1>)(own, x, n, out);
            for (i64 m = 0; m < some; m++) {
                float &to = y[(n + m) * stride + row], sum = out[m] + more;
                to = add ? to + sum : sum;
            }
        }
    }
}

} // namespace
