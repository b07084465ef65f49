// Products of activations with a matrix in few bits: what `reference.py` beside this file defines, with activations in 8 bits.
//
// Of a few rows of activations, each row of the matrix is read once where it lies (`blocks.h`). Of more, `ROWS` rows are unpacked
// at a time, as far as a core's nearest cache holds them, and multiplied with every row of activations: the lanes of a vector
// are rows of the matrix there, so nothing is summed across lanes. A number does not depend on how many threads or rows there
// are, but for the one change of form at `MANY`.
//
// Run so far: AVX2. The lines for VNNI and for vectors of 64 bytes are compiled by the tests, where the compiler knows them, but no
// processor has run them.

#include <memory>
#include <omp.h>

#include "blocks.h"

namespace {

constexpr i64 MANY = 8;                                              // rows of activations from which on unpacking pays
constexpr int LANES = lanes<float>, PANELS = 2, ROWS = PANELS * LANES; // of the matrix at a time
constexpr int TOKENS = WIDE == 64 ? 8 : 4;                           // that share the codes in registers
typedef int8_t wide_i8 __attribute__((vector_size(WIDE)));
typedef int16_t wide_i16 __attribute__((vector_size(WIDE)));

// ---- sums of products, of a few neighbours in each lane --------------------------------------------------------------------

// `Code`, `Own`: types of codes and of activations. NEIGHBOURS: of a lane. `Sum`: where `ADDS<F>` products of vectors may be added.
#if WIDE >= 32
#if WIDE == 64 && defined(__AVX512VNNI__)
#define DOT(sum, a, b) (wide_i32)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(a), (__m512i)(b))
#elif WIDE == 32 && defined(DPBUSD)
#define DOT(sum, a, b) (wide_i32)DPBUSD((__m256i)(sum), (__m256i)(a), (__m256i)(b))
#endif
#if WIDE == 64
#define WIDER(name) _mm512_##name
typedef __m512i wide_int;
#else
#define WIDER(name) _mm256_##name
typedef __m256i wide_int;
#endif

// A sum stays where it is: a compiler that adds later, in another order, keeps every product in memory until then.
template <class V> inline V settled(V sum) {
    asm("" : "+v"(sum));
    return sum;
}

struct Bytes { // unsigned codes and bytes: the products of each two neighbours in 16 bits, or of four in 32 with VNNI
    using Code = uint8_t;
    using Own = int8_t;
    static constexpr int NEIGHBOURS = 4;
#if defined(DOT)
    using Sum = wide_i32;
    template <class F> static constexpr int ADDS = 1 << 20;
    static Sum gain(Sum sum, wide_i8 codes, wide_i32 own) { return settled(DOT(sum, codes, own)); }
    static wide_i32 total(Sum sum) { return sum; }
#else
    using Sum = wide_i16;
    template <class F> static constexpr int ADDS = 32767 / (2 * 127 * F::MAX); // before 16 bits are full
    static Sum gain(Sum sum, wide_i8 codes, wide_i32 own) { return settled(sum + (wide_i16)WIDER(maddubs_epi16)((wide_int)codes, (wide_int)own)); }
    static wide_i32 total(Sum sum) { return (wide_i32)WIDER(madd_epi16)((wide_int)sum, WIDER(set1_epi16)(1)); }
#endif
};
struct Words { // 16 bits, for codes of 8 bits without VNNI
    using Code = int16_t;
    using Own = int16_t;
    static constexpr int NEIGHBOURS = 2;
    using Sum = wide_i32;
    template <class F> static constexpr int ADDS = 1 << 20;
    static Sum gain(Sum sum, wide_i8 codes, wide_i32 own) { return settled(sum + (wide_i32)WIDER(madd_epi16)((wide_int)codes, (wide_int)own)); }
    static wide_i32 total(Sum sum) { return sum; }
};
#if defined(DOT)
template <class F> using Dot = Bytes;
#else
template <class F> using Dot = std::conditional_t<F::SIGNED, Words, Bytes>;
#endif
#else
struct Floats { // exact too: integers below 2^24
    using Code = float;
    using Own = float;
    static constexpr int NEIGHBOURS = 1;
    using Sum = wide_f32;
    template <class F> static constexpr int ADDS = 1 << 20;
    static Sum gain(Sum sum, wide_i8 codes, wide_i32 own) { return sum + (wide_f32)codes * (wide_f32)own; }
    static wide_f32 total(Sum sum) { return sum; }
};
template <class F> using Dot = Floats;
#endif
inline wide_f32 floats(const wide_i32 &x) { return __builtin_convertvector(x, wide_f32); }
inline wide_f32 floats(const wide_f32 &x) { return x; }

// ---- a panel: ROWS rows unpacked, LANES side by side --------------------------------------------------------------------------

template <class F> struct Panel {
    using D = Dot<F>;
    using Code = typename D::Code;
    // A code that is signed becomes unsigned where bytes are asked for.
    static constexpr int SHIFT = F::SIGNED && std::is_same_v<Code, uint8_t> ? 128 : 0;
    static constexpr i64 COLUMNS = 1024 / sizeof(Code); // numbers of each row: 16 KiB of codes in all, of vectors of 32 bytes
    static constexpr i64 GROUPS = COLUMNS / F::GROUP;
    alignas(64) Code codes[COLUMNS / D::NEIGHBOURS][PANELS][LANES][D::NEIGHBOURS];
    alignas(64) float steps[GROUPS][PANELS][LANES], lows[GROUPS][PANELS][LANES];

    // Of `rows` rows of `bytes` each, numbers [k, k + count).
    void unpack(const uint8_t *w, i64 bytes, i64 rows, i64 k, i64 count) {
        constexpr int slices = F::BLOCK / SLICE, groups = F::BLOCK / F::GROUP;
        if (rows < ROWS) memset(codes, 0, sizeof codes), memset(steps, 0, sizeof steps), memset(lows, 0, sizeof lows);
        for (i64 r = 0; r < rows; r++) {
            const uint8_t *b = w + r * bytes + k / F::BLOCK * F::BYTES;
            for (i64 at = 0; at < count; at += F::BLOCK, b += F::BYTES) {
                float step[groups], low[groups];
                F::steps(b, step, low);
                for (int g = 0; g < groups; g++) {
                    steps[at / F::GROUP + g][r / LANES][r % LANES] = step[g];
                    lows[at / F::GROUP + g][r / LANES][r % LANES] = low[g] - SHIFT * step[g];
                }
                for (int i = 0; i < slices; i++) {
                    alignas(32) Code own[SLICE];
                    codes_u8 bytes_of = F::codes(b, i);
                    if constexpr (SHIFT) bytes_of ^= 128;
                    for (int j = 0; j < SLICE; j++) own[j] = F::SIGNED && !SHIFT ? Code(int8_t(bytes_of[j])) : Code(bytes_of[j]);
                    for (int j = 0; j < SLICE; j += D::NEIGHBOURS)
                        memcpy(codes[(at + i * SLICE + j) / D::NEIGHBOURS][r / LANES][r % LANES], own + j, sizeof(Code) * D::NEIGHBOURS);
                }
            }
        }
    }

    // `to [M, ROWS]` gains the products with M rows of activations from number k on.
    template <int M> void multiply(const Activations &x, const typename D::Own *own, i64 n, i64 k, i64 count, float *to) const {
        constexpr int turns = F::GROUP / D::NEIGHBOURS, adds = std::min(turns, D::template ADDS<F>);
        static_assert(turns % adds == 0);
        const float *own_steps[M], *own_sums[M];
        const typename D::Own *rows[M];
        UNROLL for (int m = 0; m < M; m++) {
            own_steps[m] = x.steps_of<F::GROUP>(n + m) + k / F::GROUP, own_sums[m] = x.sums_of<F::GROUP>(n + m) + k / F::GROUP;
            rows[m] = own + (n + m) * x.K + k;
        }
        for (i64 g = 0; g < count / F::GROUP; g++) {
            decltype(D::total(typename D::Sum())) all[PANELS][M] = {};
            UNROLL for (int t = 0; t < turns / adds; t++) {
                typename D::Sum sum[PANELS][M] = {};
                UNROLL for (int i = 0; i < adds; i++) {
                    wide_i8 line[PANELS];
                    i64 at = g * turns + t * adds + i;
                    UNROLL for (int p = 0; p < PANELS; p++) memcpy(&line[p], codes[at][p], WIDE);
                    UNROLL for (int m = 0; m < M; m++) {
                        int32_t few; // neighbours
                        memcpy(&few, rows[m] + at * D::NEIGHBOURS, 4);
                        wide_i32 same = few - wide_i32{};
                        UNROLL for (int p = 0; p < PANELS; p++) sum[p][m] = D::gain(sum[p][m], line[p], same);
                    }
                }
                UNROLL for (int p = 0; p < PANELS; p++)
                    UNROLL for (int m = 0; m < M; m++) all[p][m] = t ? all[p][m] + D::total(sum[p][m]) : D::total(sum[p][m]);
            }
            UNROLL for (int m = 0; m < M; m++) {
                wide_f32 step = own_steps[m][g] - wide_f32{}, weight = own_sums[m][g] - wide_f32{};
                UNROLL for (int p = 0; p < PANELS; p++) {
                    float *out = to + m * ROWS + p * LANES;
                    wide_f32 sum = added(load(out), floats(all[p][m]), load(steps[g][p]) * step);
                    if constexpr (!F::SIGNED || SHIFT) sum = added(sum, load(lows[g][p]), weight);
                    keep<float>(out, sum);
                }
            }
        }
    }
};

// ---- a product -------------------------------------------------------------------------------------------------------------

struct Product {
    const uint8_t *w;
    const void *x, *bias;
    void *y;
    i64 N, K, rows, type;
    Activations own;

    // act(a null pointer to the type of x, bias and y).
    template <class A> void typed(A act) { type == 16 ? act((bf16 *)nullptr) : act((float *)nullptr); }

    template <class F> void few(F form, i64 first, i64 end, std::vector<float> &room) {
        i64 stride = end - first;
        if (stride <= 0) return;
        room.resize(N * stride);
        rows_of(form, w + first * row_bytes<F>(K), (const float *)nullptr, 0, stride, own, N, room.data(), stride, false);
        give(room.data(), stride, first, stride);
    }
    void give(const float *from, i64 stride, i64 first, i64 count) {
        typed([&](auto *of) {
            auto *own_bias = (decltype(of))bias, *to = (decltype(of))y;
            for (i64 n = 0; n < N; n++)
                for (i64 r = 0; r < count; r++)
                    store(to[n * rows + first + r], from[n * stride + r] + (bias ? number(own_bias[first + r]) : 0));
        });
    }
    template <class F, class Own> void many(const Own *codes, i64 first, Panel<F> &panel, std::vector<float> &room) {
        i64 count = std::min<i64>(ROWS, rows - first), bytes = row_bytes<F>(K);
        room.assign(N * ROWS, 0.0f);
        for (i64 k = 0; k < K; k += panel.COLUMNS) {
            i64 some = std::min<i64>(panel.COLUMNS, K - k);
            panel.unpack(w + first * bytes, bytes, count, k, some);
            i64 n = 0;
            for (; n + TOKENS <= N; n += TOKENS) panel.template multiply<TOKENS>(own, codes, n, k, some, room.data() + n * ROWS);
            for (; n < N; n++) panel.template multiply<1>(own, codes, n, k, some, room.data() + n * ROWS);
        }
        give(room.data(), ROWS, first, count);
    }
    template <class F> void run(F form, int threads) {
        using Own = typename Dot<F>::Own;
        std::unique_ptr<Own[]> wider(std::is_same_v<Own, int8_t> || N < MANY ? nullptr : new Own[N * K]);
        own.resize(N, K);
#pragma omp parallel num_threads(N *K * rows < 1 << 18 ? 1 : threads)
        {
            std::vector<float> room;
#pragma omp for schedule(static)
            for (i64 n = 0; n < N; n++) {
                typed([&](auto *of) { own.take((decltype(of))x + n * K, n); });
                if (wider)
                    for (i64 k = n * K; k < (n + 1) * K; k++) wider[k] = Own(own.codes[k]);
            }
            if (N < MANY) {
                i64 part = omp_get_thread_num(), parts = omp_get_num_threads();
                few(form, rows * part / parts, rows * (part + 1) / parts, room);
            } else {
                auto panel = std::make_unique<Panel<F>>();
                const Own *codes = wider ? wider.get() : (const Own *)own.codes.data();
#pragma omp for schedule(dynamic)
                for (i64 first = 0; first < rows; first += ROWS) many<F>(codes, first, *panel, room);
            }
        }
    }
};

} // namespace

// x [N, K] times a matrix [rows, K] of the format that has this number in ggml, transposed, plus a bias or null: y [N, rows].
// `type` of x, bias and y as `TYPES`.
extern "C" void locret_product(
    const void *x, const void *w, const void *bias, i64 form, i64 N, i64 K, i64 rows, void *y, int type, int threads) {
    with_format(form, [&](auto own) { Product{(const uint8_t *)w, x, bias, y, N, K, rows, type, {}}.run(own, threads); });
}
