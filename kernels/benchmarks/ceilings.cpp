// A processor's ceilings: integer products in registers, and memory that is read.

#include <chrono>
#include <omp.h>

#include "blocks.h"

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

} // namespace

// Operations (a product and a sum are two) per second of all threads: bytes times bytes, summed in 32 bits, in vectors as wide as
// the processor has. `rounds` of 12 sums.
extern "C" double locret_integer_peak(i64 rounds, int threads) {
    double began = 0, took = 0;
    int32_t all = 0;
#pragma omp parallel num_threads(threads) reduction(+ : all)
    {
#if WIDE == 64
        typedef __m512i V;
#define WIDER(name) _mm512_##name
#elif WIDE == 32
        typedef __m256i V;
#define WIDER(name) _mm256_##name
#endif
#pragma omp barrier
#pragma omp single
        began = now();
#if WIDE >= 32
        V sums[12] = {}, a = WIDER(set1_epi8)(3), b = WIDER(set1_epi8)(5), ones = WIDER(set1_epi16)(1);
        for (i64 i = 0; i < rounds; i++)
            UNROLL for (int j = 0; j < 12; j++) {
                asm("" : "+v"(a));
#if WIDE == 64 && defined(__AVX512VNNI__)
                sums[j] = _mm512_dpbusd_epi32(sums[j], a, b);
#elif WIDE == 32 && defined(DPBUSD)
                sums[j] = DPBUSD(sums[j], a, b);
#else
                sums[j] = WIDER(add_epi32)(sums[j], WIDER(madd_epi16)(WIDER(maddubs_epi16)(a, b), ones));
#endif
            }
        for (auto &sum : sums) all += at<int32_t>(&sum);
#else
        codes_u8 a = uint8_t(3) - codes_u8{};
        codes_i8 b = int8_t(5) - codes_i8{};
        eight_i32 sum = {};
        for (i64 i = 0; i < 12 * rounds; i++) a[0] = uint8_t(i), sum += dot<false>(a, b);
        all += sum[0];
#endif
#pragma omp barrier
#pragma omp single
        took = now() - began;
    }
    return all ? 12.0 * double(rounds) * 2 * (WIDE >= 32 ? WIDE : SLICE) * threads / took : 0;
}

// Bytes per second that all threads read of a buffer, each a part of its own.
extern "C" double locret_read_rate(const uint8_t *from, i64 bytes, int threads) {
    double began = now();
    uint8_t all = 0;
#pragma omp parallel num_threads(threads) reduction(| : all)
    {
        i64 part = omp_get_thread_num(), parts = omp_get_num_threads(), lines = bytes / 128;
        codes_u8 x[4] = {};
        for (i64 line = lines * part / parts; line < lines * (part + 1) / parts; line++)
            UNROLL for (int i = 0; i < 4; i++) x[i] |= at<codes_u8>(from + line * 128 + i * 32);
        x[0] |= x[1] | x[2] | x[3];
        for (int i = 0; i < 32; i++) all |= x[0][i];
    }
    return double(bytes) / (now() - began) + all * 1e-9;
}
