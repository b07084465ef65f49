// What the caller hands over: fields as in the `cpu.py` of each operation, one by one.

#pragma once

#include "numbers.h"

namespace {

constexpr i64 MOST_CHANNELS = 1024; // of a head

// form: 0 for the type of weights; otherwise the number of a format in ggml, of which 30 is bfloat16 (copies of float32 numbers).
struct Linear { const void *weight, *bias; i64 rows, form; };
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
