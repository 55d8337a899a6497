/* Memory of one call, given back at once; a request that fails ends the call by `longjmp`. */
#ifndef YUAN_MEMORY_H
#define YUAN_MEMORY_H

#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct block {
    struct block *next;
};

struct arena {
    jmp_buf failed;
    struct block *blocks;
};

static inline void *take_bytes(struct arena *arena, size_t bytes)
{
    struct block *block = calloc(1, sizeof(struct block) + bytes);
    if (!block)
        longjmp(arena->failed, 1);
    block->next = arena->blocks;
    arena->blocks = block;
    return block + 1;
}

/* `count` zeros of a type. */
#define TAKE(arena, count, type) ((type *)take_bytes(arena, (size_t)(count) * sizeof(type)))

static inline void release(struct arena *arena)
{
    while (arena->blocks) {
        struct block *next = arena->blocks->next;
        free(arena->blocks);
        arena->blocks = next;
    }
}

/* The least key first; no two keys are alike, or it does not matter which of them is first. */
struct heap {
    int64_t *keys;
    int32_t count;
};

static inline struct heap take_heap(struct arena *arena, int32_t capacity)
{
    struct heap heap = {TAKE(arena, capacity + 1, int64_t), 0};
    return heap;
}

static inline void push(struct heap *heap, int64_t key)
{
    int32_t i = heap->count++;
    for (; i > 0 && heap->keys[(i - 1) / 2] > key; i = (i - 1) / 2)
        heap->keys[i] = heap->keys[(i - 1) / 2];
    heap->keys[i] = key;
}

static inline int64_t pop(struct heap *heap)
{
    int64_t least = heap->keys[0], last = heap->keys[--heap->count];
    int32_t i = 0;
    for (int32_t child = 1; child < heap->count; child = 2 * i + 1) {
        if (child + 1 < heap->count && heap->keys[child + 1] < heap->keys[child])
            child++;
        if (heap->keys[child] >= last)
            break;
        heap->keys[i] = heap->keys[child];
        i = child;
    }
    heap->keys[i] = last;
    return least;
}

/* As `fmax` and `fmin` of numbers, without a call. */
static inline double max_of(double a, double b)
{
    return a > b ? a : b;
}

static inline double min_of(double a, double b)
{
    return a < b ? a : b;
}

#endif
