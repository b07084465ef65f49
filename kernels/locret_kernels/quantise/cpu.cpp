// Rows of one layer go from its tail into few bits and come back from them, on a CPU: what `locret_kit/cache/storage/quantised.py`
// defines with tensors, for heads of equal length that each have a table of their own.
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
#include "levels.h"

namespace {

// Codes of a row of keys, each channel by its own step and zero point.
void encode(const float *x, const f16 *zero, const f16 *step, i64 D, int bits, uint8_t *to) {
    const float most = float((1 << bits) - 1), whole = 12582912; // a number becomes whole, ties to even, where that is added
    each<float>(
        D,
        [&](auto d) {
            wide_f32 by = (load(x + d) - load(zero + d)) / load(step + d);
            by = by > 0.0f ? by : (wide_f32){};
            by = by < most ? by : (wide_f32){} + most;
            auto codes = __builtin_convertvector(__builtin_convertvector((by + whole) - whole, wide_i32), quarter_u8);
            memcpy(to + d, &codes, lanes<float>);
        },
        [&](i64 d) { to[d] = uint8_t(code(x[d], {step[d], zero[d]}, bits)); });
}
void unpacked(const uint8_t *codes, const f16 *zero, const f16 *step, i64 D, float *to) { // the other way round
    each<float>(
        D, [&](auto d) { keep<float>(to + d, load(zero + d) + load(codes + d) * load(step + d)); },
        [&](i64 d) { to[d] = number(zero[d]) + float(codes[d]) * number(step[d]); });
}
// out [D] becomes x [D] times a [D, D].
void multiply(const float *x, const float *a, i64 D, float *out) {
    constexpr int V = 4;
    i64 c = 0;
    for (; c + V * lanes<float> <= D; c += V * lanes<float>) {
        wide_f32 sum[V] = {};
        for (i64 i = 0; i < D; i++)
            UNROLL for (int v = 0; v < V; v++) sum[v] += x[i] * load(a + i * D + c + v * lanes<float>);
        UNROLL for (int v = 0; v < V; v++) keep<float>(out + c + v * lanes<float>, sum[v]);
    }
    if (c == D) return;
    std::fill(out + c, out + D, 0.0f);
    for (i64 i = 0; i < D; i++)
        for (i64 d = c; d < D; d++) out[d] += x[i] * a[i * D + d];
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
    const Weights *tail_keys, *tail_values; // [H, tail_room, D]
    const float *hadamard;              // [D, D]
    i64 heads, rows, capacity, channels, bits, groups, value_group, tail, ready, full, pairs, type; // type: as `TYPES`
    Weights *keys, *values; // [H, room, D]: all rows as they are read back, the tail's too
    i64 tail_room, room;
};
}

namespace {

constexpr i64 PART = 64; // rows whose values are one item

void take(const Group &g, const void *x, i64 at, float *to) { // a row
    for (i64 d = 0; d < g.channels; d++)
        to[d] = g.type == 16 ? number(((const bf16 *)x)[at + d]) : g.type == 64 ? float(((const double *)x)[at + d]) : ((const float *)x)[at + d];
}
void give(const Group &g, void *x, i64 at, const float *from) {
    for (i64 d = 0; d < g.channels; d++)
        if (g.type == 16) store(((bf16 *)x)[at + d], from[d]);
        else if (g.type == 64) ((double *)x)[at + d] = from[d];
        else ((float *)x)[at + d] = from[d];
}

struct Head {
    const Group &g;
    i64 h, S = g.rows, D = g.channels, M = g.groups, bytes = D * g.bits / 8;
    i64 first = S - g.tail, end = first + g.ready; // rows [first, end) may leave
    int16_t *group = g.group + h * g.capacity;
    std::vector<float> keys;
    std::vector<char> leaving = std::vector<char>(S);

    Head(const Group &g, i64 h) : g(g), h(h) {
        for (i64 s = first; s < end; s++) leaving[s] = group[s] < 0;
    }

    void key(i64 s, uint8_t *codes, float *to) const { // of its codes
        unpack(g.bits, g.key_codes + (h * g.capacity + s) * bytes, bytes, codes);
        i64 at = (h * M + std::max<i64>(group[s], 0)) * D;
        unpacked(codes, g.key_zero + at, g.key_step + at, D, to);
    }

    void value(i64 s, uint8_t *codes, float *rotated, float *to) const {
        unpack(g.bits, g.value_codes + (h * g.capacity + s) * bytes, bytes, codes);
        i64 parts = D / g.value_group, at = (h * g.capacity + s) * parts;
        for (i64 c = 0; c < parts; c++) {
            float zero = number(g.value_zero[at + c]), step = number(g.value_step[at + c]);
            for (i64 d = c * g.value_group; d < (c + 1) * g.value_group; d++) rotated[d] = zero + float(codes[d]) * step;
        }
        multiply(rotated, g.hadamard, D, to);
    }

    // Rows from `from` on as they are read back, with their values or those of the tail alone.
    void open(i64 from, bool values) const {
        std::vector<float> x(2 * D);
        std::vector<uint8_t> codes(D);
        for (i64 s = from, last = std::min(S, from + PART); s < last; s++) {
            i64 to = (h * g.room + s) * D, tail = (h * g.tail_room + s - first) * D, size = D * (g.type == 16 ? 2 : g.type / 8);
            if (s >= first) {
                memcpy((char *)g.keys + to * (size / D), (const char *)g.tail_keys + tail * (size / D), size);
                memcpy((char *)g.values + to * (size / D), (const char *)g.tail_values + tail * (size / D), size);
                continue;
            }
            key(s, codes.data(), x.data());
            give(g, g.keys, to, x.data());
            if (!values) continue;
            value(s, codes.data(), x.data() + D, x.data());
            give(g, g.values, to, x.data());
        }
    }

    void read() {
        keys.resize(S * D);
        for (i64 s = 0; s < S; s++) take(g, g.keys, (h * g.room + s) * D, keys.data() + s * D);
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
        std::vector<float> middle = mean(all), variance(D), square(D), far(S);
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
                    square[d] = y * y;
                }
                far[s] = dot(square.data(), variance.data(), D);
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
        for (size_t i = 0; i < rows.size(); i++) place[rows[i]] = dot(y.data() + i * D, direction.data(), D);
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
                encode(keys.data() + s * D, g.key_zero + at, g.key_step + at, D, int(g.bits), codes.data());
                pack(codes.data(), D, int(g.bits), g.key_codes + (h * g.capacity + s) * bytes);
                group[s] = int16_t(t);
            }
    }

    void store_values(i64 from) const {
        i64 parts = D / g.value_group;
        std::vector<float> own(D), x(D);
        std::vector<uint8_t> codes(D);
        for (i64 s = from, last = std::min(end, from + PART); s < last; s++) {
            if (!leaving[s]) continue;
            take(g, g.values, (h * g.room + s) * D, own.data());
            multiply(own.data(), g.hadamard, D, x.data());
            for (i64 c = 0; c < parts; c++) {
                const float *part = x.data() + c * g.value_group;
                auto [lo, hi] = std::minmax_element(part, part + g.value_group);
                Levels by = levels(*lo, *hi, int(g.bits));
                for (i64 i = 0; i < g.value_group; i++) codes[c * g.value_group + i] = uint8_t(code(part[i], by, int(g.bits)));
                i64 at = (h * g.capacity + s) * parts + c;
                g.value_step[at] = by.step, g.value_zero[at] = by.zero;
            }
            pack(codes.data(), D, int(g.bits), g.value_codes + (h * g.capacity + s) * bytes);
        }
    }
};

} // namespace

// Rows of a layer as they are read back, all values among them or the tail's alone.
extern "C" void locret_open(const Group *g, int values, int threads) {
    const i64 parts = (g->rows + PART - 1) / PART;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (i64 i = 0; i < g->heads * parts; i++) Head(*g, i / parts).open(i % parts * PART, values);
}

extern "C" void locret_quantise(const Group *g, int threads) {
    std::vector<Head> heads;
    for (i64 h = 0; h < g->heads; h++) heads.emplace_back(*g, h);
    const i64 all = g->heads, parts = (g->ready + PART - 1) / PART;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (i64 i = 0; i < all * (1 + parts); i++) {
        Head &head = heads[i % all];
        if (i < all) { // the longest first
            head.read();
            head.store_keys();
            head.keys = {};
        } else head.store_values(head.first + (i / all - 1) * PART);
    }
}
