// What the caller hands over: fields as in the `cpu.py` of each operation, one by one.

#pragma once

#include "numbers.h"

namespace {

constexpr i64 MOST_CHANNELS = 1024; // of a head

// A format of few bits: sizes of its blocks, and calls of the `product/cpu.cpp` that is compiled for it. x: `Activations`.
struct Format {
    i64 block, nbytes;
    void (*rows)(const void *w, const void *bias, i64 type, i64 first, i64 end, const void *x, i64 N, float *y, i64 stride, int add);
    void (*unpack)(const void *w, i64 K, float *out);
};
// halved: whether weights of float32 are copied in bfloat16. format: null where they are not in few bits.
struct Linear { const void *weight, *bias; i64 rows, halved; const Format *format; };
struct Layer {
    const void *norm, *query_norm, *key_norm, *mlp_norm;
    Linear query, key, value, out, gate, up, down, fc1, fc2;
    double norm_eps, head_eps, mlp_eps, scaling;
};
struct Decoder {
    i64 layers, width, query_heads, heads, channels, vocabulary;
    Linear words;
    const void *norm;
    double eps;
    Linear head;
    const Layer *layer;
};
struct Packed {
    uint8_t *key_codes, *value_codes;
    void *group; // int16 or int32
    const f16 *key_step, *key_zero, *value_step, *value_zero;
    void *tail_keys, *tail_values;
    i64 bits, group_bytes, groups, sharing, value_groups, tail_room, tail;
};
struct Rows {
    void *keys, *values;
    int32_t *positions;
    float *scores, *stats;
    const i64 *starts, *lengths; // before the token
    const void *cos, *sin;       // tables [S, R] by which rows are rotated as they are read
    const void *own_cos, *own_sin; // of the new token [R], where rows are rotated as they are written
    i64 position, rotated, before, window, stats_stride, statistics, by_head; // before: -1, or tokens before true distances
    const Packed *packed;
};

enum { ABOVE = 1, SQUARE = 2, SUM = 4 }; // statistics, in the order of their names

} // namespace
