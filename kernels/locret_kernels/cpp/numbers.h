// Numbers of each type, and vectors of them: `WIDE` bytes, as wide as the processor has.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WIDE 64
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDE 32
#else
#define WIDE 16
#endif

// Before a loop of few and constant turns: without it its vectors would be kept in memory.
#define UNROLL _Pragma("GCC unroll 16")

namespace {

using i64 = int64_t;
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class A> struct Lanes;
template <> struct Lanes<float> {
    typedef float plain __attribute__((vector_size(WIDE)));
    typedef float wide __attribute__((vector_size(WIDE), aligned(4), may_alias));
};
template <> struct Lanes<double> {
    typedef double plain __attribute__((vector_size(WIDE)));
    typedef double wide __attribute__((vector_size(WIDE), aligned(8), may_alias));
};
typedef uint32_t wide_u32 __attribute__((vector_size(WIDE)));
typedef int32_t wide_i32 __attribute__((vector_size(WIDE)));
typedef float wide_f32 __attribute__((vector_size(WIDE)));
typedef uint16_t half_u16 __attribute__((vector_size(WIDE / 2), aligned(2), may_alias));
typedef uint8_t quarter_u8 __attribute__((vector_size(WIDE / 4), aligned(1), may_alias));
template <class A> constexpr int lanes = WIDE / sizeof(A);

inline float number(float x) { return x; }
inline double number(double x) { return x; }
inline float number(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
#if defined(__F16C__)
inline float number(f16 x) { return _cvtsh_ss(x.bits); }
#else
inline float number(f16 x) { // finite ones
    uint32_t bits = uint32_t(x.bits & 0x7fff) << 13, scale = 0x77800000, sign = uint32_t(x.bits & 0x8000) << 16;
    float out, by;
    memcpy(&out, &bits, 4);
    memcpy(&by, &scale, 4); // 2^112, exact for subnormal numbers too
    out *= by;
    memcpy(&bits, &out, 4);
    bits |= sign;
    memcpy(&out, &bits, 4);
    return out;
}
#endif
inline void store(float &to, float x) { to = x; }
inline void store(double &to, double x) { to = x; }
inline void store(bf16 &to, float x) { // to the nearest, ties to even, as PyTorch
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline wide_f32 load(const float *p) { return *(const Lanes<float>::wide *)p; }
inline Lanes<double>::plain load(const double *p) { return *(const Lanes<double>::wide *)p; }
inline wide_f32 load(const bf16 *p) {
#if WIDE == 64
    return (wide_f32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif WIDE == 32
    return (wide_f32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (wide_f32)(__builtin_convertvector(*(const half_u16 *)p, wide_u32) << 16);
#endif
}
inline wide_f32 load(const f16 *p) {
#if WIDE == 64
    return (wide_f32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif WIDE == 32 && defined(__F16C__)
    return (wide_f32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    wide_f32 out;
    for (int i = 0; i < lanes<float>; i++) out[i] = number(p[i]);
    return out;
#endif
}
inline wide_f32 load(const uint8_t *p) {
#if WIDE == 64
    return (wide_f32)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif WIDE == 32
    return (wide_f32)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    return __builtin_convertvector(*(const quarter_u8 *)p, wide_f32);
#endif
}

template <class A> using Wide = typename Lanes<A>::plain;
template <class A> inline void keep(A *to, const Wide<A> &v) { memcpy(to, &v, sizeof v); }

// sum + a b, rounded once: left to itself, a compiler decides that loop by loop, and sums of the same numbers would differ.
#if WIDE == 64
inline wide_f32 added(wide_f32 sum, wide_f32 a, wide_f32 b) { return (wide_f32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
inline Wide<double> added(Wide<double> sum, Wide<double> a, Wide<double> b) {
    return (Wide<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum);
}
#elif WIDE == 32
inline wide_f32 added(wide_f32 sum, wide_f32 a, wide_f32 b) { return (wide_f32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }
inline Wide<double> added(Wide<double> sum, Wide<double> a, Wide<double> b) {
    return (Wide<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sum);
}
#else
template <class V> inline V added(const V &sum, const V &a, const V &b) { return sum + a * b; }
#endif

// Numbers by vectors where they are float32, and the rest one by one.
template <class A, class F, class G> inline void each(i64 n, F wide, G one) {
    i64 i = 0;
    if constexpr (sizeof(A) == 4)
        for (; i + lanes<A> <= n; i += lanes<A>) wide(i);
    for (; i < n; i++) one(i);
}

// Sums of the numbers of a vector, and of each of four.
template <class V, class A> inline A total(const V &v, A) {
    A part[sizeof(V) / sizeof(A)];
    memcpy(part, &v, sizeof(v));
    for (int n = sizeof(V) / sizeof(A) / 2; n; n /= 2)
        for (int i = 0; i < n; i++) part[i] += part[i + n];
    return part[0];
}
template <class V, class A> inline void totals(const V &a, const V &b, const V &c, const V &d, A *out) {
    out[0] = total(a, A()), out[1] = total(b, A()), out[2] = total(c, A()), out[3] = total(d, A());
}
#if WIDE >= 32
inline __m256 folded(const wide_f32 &v) {
#if WIDE == 64
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)));
#else
    return (__m256)v;
#endif
}
inline void totals(const wide_f32 &a, const wide_f32 &b, const wide_f32 &c, const wide_f32 &d, float *out) {
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(folded(a), folded(b)), _mm256_hadd_ps(folded(c), folded(d)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
inline float total(const wide_f32 &v, float) {
    __m256 half = folded(v);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    four = _mm_hadd_ps(four, four);
    return _mm_cvtss_f32(_mm_hadd_ps(four, four));
}
#endif

// Codes of bytes; the first has the lowest bits.
template <int BITS> inline void unpack(const uint8_t *__restrict codes, i64 bytes, uint8_t *__restrict out) {
    constexpr int each = 8 / BITS, mask = (1 << BITS) - 1;
    i64 byte = 0;
#if WIDE == 64
    if constexpr (BITS == 4)
        for (; byte + 32 <= bytes; byte += 32) { // a byte 00hl becomes 0h0l
            __m512i two = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + byte)));
            two = _mm512_and_si512(_mm512_or_si512(two, _mm512_slli_epi16(two, 4)), _mm512_set1_epi8(0xf));
            _mm512_storeu_si512(out + 2 * byte, two);
        }
#endif
    for (; byte < bytes; byte++)
        for (int i = 0; i < each; i++) out[byte * each + i] = (codes[byte] >> (i * BITS)) & mask;
}
inline void unpack(i64 bits, const uint8_t *codes, i64 bytes, uint8_t *out) {
    bits == 4 ? unpack<4>(codes, bytes, out) : unpack<2>(codes, bytes, out);
}

template <class A> inline A dot(const A *a, const A *b, i64 n) {
    Wide<A> sum = {};
    i64 i = 0;
    for (; i + lanes<A> <= n; i += lanes<A>) sum = added(sum, load(a + i), load(b + i));
    A out = total(sum, A());
    for (; i < n; i++) out += a[i] * b[i];
    return out;
}

// Of four vectors `a [4, n]` with one.
template <class A> inline void dots(const A *a, const A *b, i64 n, A *out) {
    Wide<A> sum[4] = {};
    i64 i = 0;
    for (; i + lanes<A> <= n; i += lanes<A>)
        UNROLL for (int r = 0; r < 4; r++) sum[r] = added(sum[r], load(a + r * n + i), load(b + i));
    totals(sum[0], sum[1], sum[2], sum[3], out);
    for (; i < n; i++)
        for (int r = 0; r < 4; r++) out[r] += a[r * n + i] * b[i];
}

inline wide_f32 exponential(wide_f32 x) { // Cephes' polynomial, to about one unit in the last place
    x = x < -87.0f ? (wide_f32){} - 87.0f : x;
    x = x > 88.0f ? (wide_f32){} + 88.0f : x;
    wide_f32 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    wide_f32 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    wide_f32 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (wide_f32)((__builtin_convertvector(n, wide_i32) + 127) << 23);
}

inline float largest(const float *x, i64 n) {
    float out = x[0];
    i64 i = 0;
    if (n >= lanes<float>) {
        wide_f32 wide = load(x);
        for (; i + lanes<float> <= n; i += lanes<float>) {
            wide_f32 one = load(x + i);
            wide = one > wide ? one : wide;
        }
        for (int j = 0; j < lanes<float>; j++) out = std::max(out, wide[j]);
    }
    for (; i < n; i++) out = std::max(out, x[i]);
    return out;
}
inline double largest(const double *x, i64 n) { return *std::max_element(x, x + n); }

// x becomes exp(x - most), and the sum of those is returned.
inline float exponentials(float *x, i64 n, float most) {
    float sum = 0;
    i64 i = 0;
    wide_f32 wide = {};
    for (; i + lanes<float> <= n; i += lanes<float>) {
        wide_f32 e = exponential(load(x + i) - most);
        wide += e;
        memcpy(x + i, &e, sizeof e);
    }
    sum = total(wide, 0.0f);
    for (; i < n; i++) sum += x[i] = std::exp(x[i] - most);
    return sum;
}
inline double exponentials(double *x, i64 n, double most) {
    double sum = 0;
    for (i64 i = 0; i < n; i++) sum += x[i] = std::exp(x[i] - most);
    return sum;
}

inline void silu(float *x, i64 n) {
    i64 i = 0;
    for (; i + lanes<float> <= n; i += lanes<float>) {
        wide_f32 own = load(x + i), out = own / (1.0f + exponential(-own));
        memcpy(x + i, &out, sizeof out);
    }
    for (; i < n; i++) x[i] /= 1 + std::exp(-x[i]);
}
inline void silu(double *x, i64 n) {
    for (i64 i = 0; i < n; i++) x[i] /= 1 + std::exp(-x[i]);
}

} // namespace
