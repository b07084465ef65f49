// Steps and zero points of numbers in few bits: what `quantise/__init__.py` defines with tensors.

#pragma once

#include <algorithm>
#include <cmath>

#include "numbers.h"

namespace {

constexpr float HALF_MAX = 65504, SUBNORMAL = 5.9604644775390625e-8f, ROUNDING = 0.0009765625f;

inline f16 half(float x) { // of numbers within its range, to the nearest, ties to even
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000, bits &= 0x7fffffff;
    if (bits < 0x38800000) { // below 2^-14: multiples of 2^-24
        float size;
        memcpy(&size, &bits, 4);
        return {uint16_t(sign | uint32_t(std::nearbyint(size / SUBNORMAL)))};
    }
    bits += 0xfff + (bits >> 13 & 1);
    return {uint16_t(sign | ((bits >> 13) - (112 << 10)))};
}
inline float within(float x, float lo) { return std::min(std::max(x, lo), HALF_MAX); }

struct Levels { f16 step, zero; };
inline Levels levels(float lo, float hi, int bits) {
    float most = float((1 << bits) - 1);
    f16 zero = half(within(lo, -HALF_MAX));
    if (number(zero) > lo) zero = half(within(lo - std::fabs(lo) * ROUNDING - SUBNORMAL, -HALF_MAX));
    float reach = hi - number(zero), each = reach / most;
    f16 step = half(within(each, SUBNORMAL));
    if (reach > (most + 0.5f) * number(step)) step = half(std::min(each * (1 + ROUNDING) + SUBNORMAL, HALF_MAX));
    return {step, zero};
}
inline float code(float x, Levels by, int bits) {
    // 0 of what is no number: the first argument is what such a comparison leaves.
    return std::nearbyint(std::min(std::max(0.0f, (x - number(by.zero)) / number(by.step)), float((1 << bits) - 1)));
}
// A row of numbers in 8 bits, with a step and a zero point for every `shared` channels.
inline void row_codes(const float *x, i64 D, i64 shared, uint8_t *codes, f16 *step, f16 *zero) {
    for (i64 c = 0; c < D / shared; c++) {
        const float *part = x + c * shared;
        auto [lo, hi] = std::minmax_element(part, part + shared);
        Levels by = levels(*lo, *hi, 8);
        for (i64 i = 0; i < shared; i++) codes[c * shared + i] = uint8_t(code(part[i], by, 8));
        step[c] = by.step, zero[c] = by.zero;
    }
}

} // namespace
