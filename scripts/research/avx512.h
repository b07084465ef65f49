// AVX-512 on a processor without it: the intrinsics that the C++ of `kernels/locret_kernels` uses, as SIMDe computes them.
// `emulate.py` includes it before a source. WIDE_VECTORS: vectors of 64 bytes. VNNI: its products of bytes.

#pragma once
#include <cstring>
#include <immintrin.h>
#include <omp.h>
#include <simde/x86/avx512.h>

template <class To, class From> inline To as(const From &x) {
    static_assert(sizeof(To) == sizeof(From));
    To out;
    memcpy(&out, &x, sizeof out);
    return out;
}
template <class From, class To, class V> inline auto widened(const V &x) { // numbers of another type
    constexpr int N = sizeof(V) / sizeof(From);
    typedef From from __attribute__((vector_size(sizeof(V))));
    typedef To to __attribute__((vector_size(N * sizeof(To))));
    return __builtin_convertvector(as<from>(x), to);
}
typedef simde__m512i I;
#define ONE(name, x, n) as<__m512i>(simde_mm512_##name(as<I>(x), n))
#define TWO(name, a, b) as<__m512i>(simde_mm512_##name(as<I>(a), as<I>(b)))
#define _mm512_and_si512(a, b) TWO(and_si512, a, b)
#define _mm512_or_si512(a, b) TWO(or_si512, a, b)
#define _mm512_madd_epi16(a, b) TWO(madd_epi16, a, b)
#define _mm512_maddubs_epi16(a, b) TWO(maddubs_epi16, a, b)
#define _mm512_slli_epi16(a, n) ONE(slli_epi16, a, n)
#define _mm512_slli_epi32(a, n) ONE(slli_epi32, a, n)
#define _mm512_set1_epi8(x) as<__m512i>(simde_mm512_set1_epi8(x))
#define _mm512_set1_epi16(x) as<__m512i>(simde_mm512_set1_epi16(x))
#define _mm512_storeu_si512(p, x) simde_mm512_storeu_si512(p, as<I>(x))
#define _mm512_dpbusd_epi32(s, a, b) as<__m512i>(simde_mm512_dpbusd_epi32(as<I>(s), as<I>(a), as<I>(b)))
#undef _mm256_dpbusd_epi32
#define _mm256_dpbusd_epi32(s, a, b) as<__m256i>(simde_mm256_dpbusd_epi32(as<simde__m256i>(s), as<simde__m256i>(a), as<simde__m256i>(b)))
#define _mm512_fmadd_ps(a, b, c) as<__m512>(simde_mm512_fmadd_ps(as<simde__m512>(a), as<simde__m512>(b), as<simde__m512>(c)))
#define _mm512_fmadd_pd(a, b, c) as<__m512d>(simde_mm512_fmadd_pd(as<simde__m512d>(a), as<simde__m512d>(b), as<simde__m512d>(c)))
#define _mm512_castps512_ps256(x) as<__m256>(simde_mm512_castps512_ps256(as<simde__m512>(x)))
#define _mm512_extractf64x4_pd(x, n) as<__m256d>(simde_mm512_extractf64x4_pd(as<simde__m512d>(x), n))
// Those that SIMDe 0.7 lacks.
#define _mm512_cvtepu8_epi16(x) as<__m512i>(widened<uint8_t, uint16_t>(x))
#define _mm512_cvtepu8_epi32(x) as<__m512i>(widened<uint8_t, uint32_t>(x))
#define _mm512_cvtepu16_epi32(x) as<__m512i>(widened<uint16_t, uint32_t>(x))
#define _mm512_cvtepi32_ps(x) as<__m512>(widened<int32_t, float>(x))
inline __m512 of_halves(__m256i x) {
    __m256 two[] = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
    return as<__m512>(two);
}
#define _mm512_cvtph_ps of_halves

#define asm(...) // whose operands would be registers of 64 bytes
#if WIDE_VECTORS
#define __AVX512F__ 1
#define __AVX512BW__ 1
#endif
#if VNNI
#define __AVX512VL__ 1
#define __AVX512VNNI__ 1
#endif
