// A full group of rows of one layer goes from its tail into few bits, on a CPU: what `locret_kit/cache/storage/quantised.py` and
// `groups.py` define with tensors, for heads of equal length that each have a table of their own.
//
// Letters: H heads, S rows, X capacity, T rows of the tail, D channels, M groups of a table. Rounds where the definition rounds: no two
// operations are joined into one (`-ffp-contract=off`). Sums are taken in another order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "layout.h"

namespace {

constexpr float HALF_MAX = 65504, SUBNORMAL = 5.9604644775390625e-8f, ROUNDING = 0.0009765625f;

f16 half(float x) { // of numbers within its range, to the nearest, ties to even
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
float within(float x, float lo) { return std::min(std::max(x, lo), HALF_MAX); }

struct Levels { f16 step, zero; };
Levels levels(float lo, float hi, int bits) {
    float most = float((1 << bits) - 1);
    f16 zero = half(within(lo, -HALF_MAX));
    if (number(zero) > lo) zero = half(within(lo - std::fabs(lo) * ROUNDING - SUBNORMAL, -HALF_MAX));
    float reach = hi - number(zero), each = reach / most;
    f16 step = half(within(each, SUBNORMAL));
    if (reach > (most + 0.5f) * number(step)) step = half(std::min(each * (1 + ROUNDING) + SUBNORMAL, HALF_MAX));
    return {step, zero};
}
uint8_t encode(float x, Levels by, int bits) {
    float code = std::nearbyint((x - number(by.zero)) / number(by.step));
    return uint8_t(std::min(std::max(code, 0.0f), float((1 << bits) - 1)));
}
void pack(const uint8_t *codes, i64 D, int bits, uint8_t *out) {
    int each = 8 / bits;
    for (i64 byte = 0; byte < D / each; byte++) {
        unsigned sum = 0;
        for (int i = 0; i < each; i++) sum |= unsigned(codes[byte * each + i]) << (i * bits);
        out[byte] = uint8_t(sum);
    }
}

} // namespace

extern "C" {
struct Group { // of a layer
    uint8_t *key_codes, *value_codes;   // [H, X, D * bits / 8]
    int16_t *group;                     // [H, X]
    f16 *key_step, *key_zero;           // [H, M, D]
    f16 *value_step, *value_zero;       // [H, X, D / value_group]
    const void *tail_keys, *tail_values; // [H, T, D]
    const float *hadamard;              // [D, D]
    i64 heads, rows, capacity, channels, bits, groups, value_group, tail, ready, full, pairs, type; // type: as `TYPES`
};
}

namespace {

float in_type(const Group &g, const void *x, i64 at) {
    return g.type == 16 ? number(((const bf16 *)x)[at]) : g.type == 64 ? float(((const double *)x)[at]) : ((const float *)x)[at];
}

struct Head {
    const Group &g;
    i64 h, S = g.rows, D = g.channels, M = g.groups, first = S - g.tail, end = first + g.ready; // rows [first, end) may leave
    int16_t *group = g.group + h * g.capacity;
    std::vector<float> keys = std::vector<float>(S * D);
    std::vector<char> leaving = std::vector<char>(S);

    void read() {
        i64 bytes = D * g.bits / 8;
        std::vector<uint8_t> codes(D);
        for (i64 s = 0; s < first; s++) {
            float *to = keys.data() + s * D;
            unpack(g.bits, g.key_codes + (h * g.capacity + s) * bytes, bytes, codes.data());
            i64 at = (h * M + std::max<i64>(group[s], 0)) * D;
            const f16 *zero = g.key_zero + at, *step = g.key_step + at;
            each<float>(
                D, [&](auto d) { keep<float>(to + d, load(zero + d) + load(codes.data() + d) * load(step + d)); },
                [&](i64 d) { to[d] = number(zero[d]) + float(codes[d]) * number(step[d]); });
            for (i64 d = 0; g.type == 16 && d < D; d++) {
                bf16 rounded;
                store(rounded, to[d]);
                to[d] = number(rounded);
            }
        }
        for (i64 s = first; s < S; s++)
            for (i64 d = 0; d < D; d++) keys[s * D + d] = in_type(g, g.tail_keys, (h * g.tail + s - first) * D + d);
        for (i64 s = first; s < end; s++) leaving[s] = group[s] < 0;
    }

    // The mean of some rows, channel by channel.
    template <class F> std::vector<float> mean(F in) const {
        std::vector<float> out(D);
        i64 n = 0;
        for (i64 s = 0; s < S; s++)
            if (in(s)) {
                for (i64 d = 0; d < D; d++) out[d] += keys[s * D + d];
                n++;
            }
        for (float &x : out) x /= float(std::max<i64>(n, 1));
        return out;
    }

    // The loose rows that stand out most.
    std::vector<char> standing_out(const std::vector<char> &loose) const {
        auto all = [&](i64 s) { return group[s] >= 0 || leaving[s]; };
        std::vector<float> middle = mean(all), variance(D), far(S);
        i64 n = 0;
        for (i64 s = 0; s < S; s++)
            if (all(s)) {
                for (i64 d = 0; d < D; d++) {
                    float y = keys[s * D + d] - middle[d];
                    variance[d] += y * y;
                }
                n++;
            }
        for (float &x : variance) x = 1 / std::max(x / float(std::max<i64>(n, 1)), 1e-12f);
        std::vector<i64> order;
        for (i64 s = 0; s < S; s++)
            if (loose[s]) {
                for (i64 d = 0; d < D; d++) {
                    float y = keys[s * D + d] - middle[d];
                    far[s] += y * y * variance[d];
                }
                order.push_back(s);
            }
        std::stable_sort(order.begin(), order.end(), [&](i64 a, i64 b) { return far[a] > far[b]; });
        std::vector<char> out(S);
        for (i64 i = 0; i < std::min<i64>(order.size(), 2 * g.pairs); i++) out[order[i]] = 1;
        return out;
    }

    // Rows in which neighbours are alike.
    void sort_alike(std::vector<i64> &rows) const {
        if (rows.empty()) return;
        std::vector<float> y(rows.size() * D), squares(D), direction(D), place(S), middle(D);
        for (i64 s : rows)
            for (i64 d = 0; d < D; d++) middle[d] += keys[s * D + d];
        for (float &x : middle) x /= float(rows.size());
        for (size_t i = 0; i < rows.size(); i++)
            for (i64 d = 0; d < D; d++) y[i * D + d] = keys[rows[i] * D + d] - middle[d], squares[d] += y[i * D + d] * y[i * D + d];
        i64 widest = std::max_element(squares.begin(), squares.end()) - squares.begin();
        for (size_t i = 0; i < rows.size(); i++)
            for (i64 d = 0; d < D; d++) direction[d] += y[i * D + d] * y[i * D + widest];
        for (size_t i = 0; i < rows.size(); i++)
            for (i64 d = 0; d < D; d++) place[rows[i]] += y[i * D + d] * direction[d];
        std::stable_sort(rows.begin(), rows.end(), [&](i64 a, i64 b) { return place[a] < place[b]; });
    }

    void store_keys() {
        if (std::none_of(leaving.begin(), leaving.end(), [](char x) { return x; })) return;
        std::vector<i64> counts(M), order(M);
        for (i64 s = 0; s < S; s++)
            if (group[s] >= 0) counts[group[s]]++;
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](i64 a, i64 b) { return counts[a] < counts[b]; });
        std::vector<char> loose(S), made(M);
        for (i64 s = 0; s < S; s++) loose[s] = leaving[s] || (group[s] >= 0 && counts[group[s]] <= 2);
        std::vector<char> paired = standing_out(loose);
        // The fewest of the sparsest groups that have room for their own rows and for those that leave.
        std::vector<i64> own[2] = {std::vector<i64>(M), std::vector<i64>(M)};
        i64 moved[2] = {0, 0}, full[2] = {g.full, 2}, likes = 0, taken = 0;
        for (i64 s = 0; s < S; s++) {
            if (group[s] >= 0) own[int(paired[s])][group[s]]++;
            moved[int(paired[s])] += leaving[s];
        }
        for (i64 needed = M + 1; taken < M && needed > taken;) {
            i64 next = order[taken++];
            made[next] = 1, needed = 0;
            for (int kind = 0; kind < 2; kind++) {
                moved[kind] += own[kind][next];
                i64 groups = (moved[kind] + full[kind] - 1) / full[kind];
                needed += groups;
                if (!kind) likes = groups;
            }
        }
        std::vector<i64> alike, pairs, target(S, -1);
        for (i64 s = 0; s < S; s++)
            if (leaving[s] || (group[s] >= 0 && made[group[s]])) (paired[s] ? pairs : alike).push_back(s);
        sort_alike(alike);
        for (size_t i = 0; i < alike.size(); i++) target[alike[i]] = order[std::min<i64>(i / g.full, M - 1)];
        for (size_t i = 0; i < pairs.size(); i++) target[pairs[i]] = order[std::min<i64>(likes + i / 2, M - 1)];
        // Levels of the groups that are taken, and codes by them.
        std::vector<float> lo(M * D), hi(M * D);
        std::vector<char> any(M);
        for (i64 s = 0; s < S; s++)
            if (i64 t = target[s]; t >= 0) {
                for (i64 d = 0; d < D; d++) {
                    float x = keys[s * D + d];
                    lo[t * D + d] = any[t] ? std::min(lo[t * D + d], x) : x, hi[t * D + d] = any[t] ? std::max(hi[t * D + d], x) : x;
                }
                any[t] = 1;
            }
        for (i64 t = 0; t < M; t++)
            for (i64 d = 0; made[t] && d < D; d++) {
                Levels by = levels(lo[t * D + d], hi[t * D + d], int(g.bits));
                g.key_step[(h * M + t) * D + d] = by.step, g.key_zero[(h * M + t) * D + d] = by.zero;
            }
        std::vector<uint8_t> codes(D);
        for (i64 s = 0; s < S; s++)
            if (i64 t = target[s]; t >= 0) {
                i64 at = (h * M + t) * D;
                for (i64 d = 0; d < D; d++) codes[d] = encode(keys[s * D + d], {g.key_step[at + d], g.key_zero[at + d]}, int(g.bits));
                pack(codes.data(), D, int(g.bits), g.key_codes + (h * g.capacity + s) * (D * g.bits / 8));
                group[s] = int16_t(t);
            }
    }

    void store_values() const {
        i64 parts = D / g.value_group;
        std::vector<float> x(D);
        std::vector<uint8_t> codes(D);
        for (i64 s = first; s < end; s++) {
            if (!leaving[s]) continue;
            std::fill(x.begin(), x.end(), 0.0f);
            for (i64 d = 0; d < D; d++) {
                float own = in_type(g, g.tail_values, (h * g.tail + s - first) * D + d);
                for (i64 j = 0; j < D; j++) x[j] += own * g.hadamard[d * D + j];
            }
            for (i64 c = 0; c < parts; c++) {
                const float *from = x.data() + c * g.value_group;
                auto [lo, hi] = std::minmax_element(from, from + g.value_group);
                Levels by = levels(*lo, *hi, int(g.bits));
                for (i64 i = 0; i < g.value_group; i++) codes[c * g.value_group + i] = encode(from[i], by, int(g.bits));
                i64 at = (h * g.capacity + s) * parts + c;
                g.value_step[at] = by.step, g.value_zero[at] = by.zero;
            }
            pack(codes.data(), D, int(g.bits), g.value_codes + (h * g.capacity + s) * (D * g.bits / 8));
        }
    }
};

} // namespace

extern "C" void locret_quantise(const Group *layers, i64 count, int threads) { // layers of as many heads
    const i64 heads = layers[0].heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (i64 i = 0; i < count * heads; i++) {
        Head head{layers[i / heads], i % heads};
        head.read();
        head.store_values();
        head.store_keys();
    }
}
