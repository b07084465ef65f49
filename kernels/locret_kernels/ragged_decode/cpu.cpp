// One token's attention over heads that hold different numbers of rows: what `__init__.py` beside this file defines.
//
// Compiled for a `TYPE` of rows (32: float32, 64: float64, 16: bfloat16) and a number of `CHANNELS` of a head (0: any); sums are of
// float32, those of float64 of float64. Letters: B texts, Q query heads, H key/value heads, G = Q / H, P = B * H, D channels.
// A head's numbers are the same whatever stands beside it and however many threads there are.

#include "attention.h"

#if TYPE == 32
using Weight = float;
using Sum = float;
#elif TYPE == 64
using Weight = double;
using Sum = double;
#else
using Weight = bf16;
using Sum = float;
#endif

extern "C" {
struct Decode {
    const Weights *keys, *values; // [N, D]
    const i64 *starts, *lengths; // [P]
    const Sums *q; // [B, Q, D], rotated
    Sums *out;     // [B, Q, D]
    const Sums *cos, *sin; // [S, R], or null
    const int32_t *places; // [N], or null
    float *received;       // [P, longest], or null
    i64 texts, queries, heads, channels, rotated, longest;
    double scaling;
};
}

extern "C" void locret_ragged_decode(const Decode *given, int threads) {
    const Decode &a = *given;
    const i64 D = CHANNELS ? CHANNELS : a.channels, P = a.texts * a.heads, G = a.queries / a.heads;
    Decoder m{};
    m.query_heads = a.queries, m.heads = a.heads, m.channels = D;
    struct Item { i64 head, from, to; };
    std::vector<Item> items;
    std::vector<std::vector<Partial<Sum>>> heads(P);
    std::vector<i64> before(P); // rows of a head that its `Attention` counts as read before the newest
    std::vector<Rows> rows(P, Rows{});
    i64 parts_of_all = 0;
    for (i64 p = 0; p < P; p++) {
        before[p] = a.lengths[p] - 1;
        rows[p].keys = (void *)a.keys, rows[p].values = (void *)a.values, rows[p].positions = (int32_t *)a.places;
        rows[p].starts = a.starts + p, rows[p].lengths = before.data() + p, rows[p].cos = a.cos, rows[p].sin = a.sin;
        rows[p].rotated = a.rotated, rows[p].before = a.places ? 0 : -1;
        if (a.received) rows[p].statistics = SUM, rows[p].stats = a.received + p * a.longest - a.starts[p];
        heads[p].resize(parts(a.lengths[p], ROWS));
        parts_of_all += heads[p].size();
        for (i64 from = 0; from < a.lengths[p]; from += ROWS) items.push_back({p, from, std::min(a.lengths[p], from + ROWS)});
    }
    std::vector<Sum> partials(parts_of_all * G * (D + 2)), logits(a.received ? P * G * a.longest : 0);
    Sum *at = partials.data();
    for (auto &head : heads)
        for (auto &part : head) part = {at, at + G, at + 2 * G}, at += G * (D + 2);
#pragma omp parallel num_threads(threads)
    {
        std::vector<Sum> space(2 * G * D + BLOCK * D + G * ROWS), own(G * ROWS);
#pragma omp for schedule(dynamic)
        for (i64 i = 0; i < i64(items.size()); i++) {
            const Item &item = items[i];
            Attention<Weight, Sum> head(m, rows[item.head], 0, (const Sum *)a.q + item.head * G * D, nullptr, nullptr, a.scaling);
            head.turned = true;
            Sum *to = a.received ? logits.data() + item.head * G * a.longest + item.from : own.data();
            head.attend(item.from, item.to, to, a.received ? a.longest : ROWS, heads[item.head][item.from / ROWS], space.data());
        }
#pragma omp for schedule(static)
        for (i64 p = 0; p < P; p++) {
            Sum *out = (Sum *)a.out + p * G * D;
            if (heads[p].empty()) {
                std::fill(out, out + G * D, Sum());
                continue;
            }
            Attention<Weight, Sum> head(m, rows[p], 0, nullptr, nullptr, nullptr, a.scaling);
            head.join(heads[p], out, logits.data() + (a.received ? p * G * a.longest : 0), a.longest);
        }
    }
}
