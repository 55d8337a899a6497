/* The moves of the search, and the random drafts that it begins with.
 *
 * A move changes a pipeline and mostly all others that are alike, so that they stay so. After a change of structure
 * the layers of the pipelines that were touched are dealt anew. */
#include <math.h>

#include "search.h"

/* --- editing a draft -------------------------------------------------------------------------------------- */

static struct draft_stage *stages_of(const struct draft *draft, int32_t p)
{
    return draft->stages + draft->pipelines[p].first_stage;
}

static void shift_first_stages(struct draft *draft, int32_t p, int32_t by)
{
    for (int32_t q = p + 1; q < draft->num_pipelines; q++)
        draft->pipelines[q].first_stage += by;
    draft->pipelines[p].num_stages += by;
    draft->num_stages += by;
}

static void remove_stage(struct draft *draft, int32_t p, int32_t s)
{
    struct draft_stage *stage = stages_of(draft, p) + s;
    size_t after = (size_t)(draft->stages + draft->num_stages - (stage + 1));
    memmove(stage, stage + 1, after * sizeof *stage);
    shift_first_stages(draft, p, -1);
}

/* Its layers go to its neighbours. */
static void drop_stage(struct draft *draft, int32_t p, int32_t s)
{
    struct draft_stage *stages = stages_of(draft, p);
    int16_t layers = stages[s].layers;
    int32_t last = draft->pipelines[p].num_stages - 1;
    if (s > 0 && s < last) {
        stages[s - 1].layers = (int16_t)(stages[s - 1].layers + layers - layers / 2);
        stages[s + 1].layers = (int16_t)(stages[s + 1].layers + layers / 2);
    } else if (last > 0) {
        stages[s ? s - 1 : 1].layers = (int16_t)(stages[s ? s - 1 : 1].layers + layers);
    }
    remove_stage(draft, p, s);
}

static int insert_stage(const struct search *search, struct draft *draft, int32_t p, int32_t s,
                        struct draft_stage stage)
{
    struct draft_stage *place = stages_of(draft, p) + s;
    if (draft->num_stages >= search->problem->num_cards ||
        draft->pipelines[p].num_stages >= search->problem->num_units - 1)
        return 0;
    size_t after = (size_t)(draft->stages + draft->num_stages - place);
    memmove(place + 1, place, after * sizeof *place);
    *place = stage;
    shift_first_stages(draft, p, 1);
    return 1;
}

static void remove_pipeline(struct search *search, struct draft *draft, int32_t p)
{
    while (draft->pipelines[p].num_stages)
        remove_stage(draft, p, draft->pipelines[p].num_stages - 1);
    draft->num_pipelines--;
    for (int32_t q = p; q < draft->num_pipelines; q++) {
        draft->pipelines[q] = draft->pipelines[q + 1];
        search->touched[q] = search->touched[q + 1];
    }
}

/* An empty pipeline at the end, with half of the micro-batches of p; -1 if there is no room. */
static int32_t add_pipeline(struct search *search, struct draft *draft, int32_t p)
{
    struct draft_pipeline *from = &draft->pipelines[p];
    int32_t added = draft->num_pipelines;
    if (added >= search->problem->num_cards || from->num_micro_batches < 2)
        return -1;
    struct draft_pipeline pipeline = {from->size, from->num_micro_batches / 2, draft->num_stages, 0};
    from->num_micro_batches -= pipeline.num_micro_batches;
    draft->pipelines[draft->num_pipelines++] = pipeline;
    return added;
}

static int are_alike(const struct search *search, const struct draft *draft, int32_t p, int32_t q)
{
    const struct draft_pipeline *a = &draft->pipelines[p], *b = &draft->pipelines[q];
    if (a->size != b->size || a->num_micro_batches != b->num_micro_batches || a->num_stages != b->num_stages)
        return 0;
    const struct pool *pools = search->problem->pools;
    for (int32_t s = 0; s < a->num_stages; s++) {
        const struct draft_stage *x = stages_of(draft, p) + s, *y = stages_of(draft, q) + s;
        if (x->num_replicas != y->num_replicas || x->width != y->width || x->layers != y->layers ||
            x->deeper != y->deeper)
            return 0;
        for (int32_t r = 0; r < x->num_replicas; r++)
            if (pools[x->pools[r]].kind != pools[y->pools[r]].kind)
                return 0;
    }
    return 1;
}

/* The pipelines that a move changes: p, and but for `alone` percent of the moves all that are alike. */
static int32_t find_members(struct search *search, const struct draft *draft, int32_t p, int32_t alone)
{
    int32_t count = 0;
    if (draw(search, 100) < alone) {
        search->members[0] = p;
        return 1;
    }
    for (int32_t q = 0; q < draft->num_pipelines; q++)
        if (q == p || are_alike(search, draft, p, q))
            search->members[count++] = q;
    return count;
}

static void count_free(struct search *search, const struct draft *draft)
{
    for (int32_t i = 0; i < search->problem->num_pools; i++)
        search->free[i] = search->problem->pools[i].count;
    for (int32_t s = 0; s < draft->num_stages; s++)
        for (int32_t r = 0; r < draft->stages[s].num_replicas; r++)
            search->free[draft->stages[s].pools[r]] -= draft->stages[s].width;
}

static int can_be(const struct search *search, int32_t pool, int32_t width, int32_t size)
{
    const struct pool *own = &search->problem->pools[pool];
    return width <= own->count && table_of(search->problem, own->first_place, width, size, 0) != NULL;
}

static int32_t draw_width(struct search *search)
{
    return 1 << draw(search, 5);
}

static void touch(struct search *search, int32_t p)
{
    search->touched[p] = 1;
}

/* --- small moves ------------------------------------------------------------------------------------------ */

static int shift_layers(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    int32_t stages = draft->pipelines[p].num_stages;
    if (stages < 2)
        return 0;
    int32_t from = draw(search, stages);
    int32_t to = draw(search, 2) ? from + (draw(search, 2) ? 1 : -1) : draw(search, stages);
    int32_t by = draw(search, 10) - 5;
    by = by > 1 ? by : 1;
    if (to < 0 || to >= stages || to == from)
        return 0;
    for (int32_t i = 0; i < count; i++) {
        struct draft_stage *own = stages_of(draft, search->members[i]);
        if (own[from].layers < by)
            return 0;
        own[from].layers = (int16_t)(own[from].layers - by);
        own[to].layers = (int16_t)(own[to].layers + by);
    }
    return 1;
}

static int deepen(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    static const int16_t steps[] = {1, 1, 2, 3, -1, -1};
    if (draft->schedule != ONE_F_ONE_B || search->space->is_plain)
        return 0;
    enum { LONG = 48 };
    int32_t stages = draft->pipelines[p].num_stages, last = draw(search, stages), kind = draw(search, 100);
    int32_t first = kind < 60 ? 0 : last, by = steps[draw(search, 6)];
    /* Of long pipelines many stages come to be no deeper than the next one: one alone mended gains nothing. */
    int32_t anew = is_large(search->problem) && stages >= LONG && kind >= 88;
    if (anew) {
        first = 0;
        last = stages - 1;
    }
    for (int32_t i = 0; i < count; i++)
        for (int32_t s = first; s <= last; s++) {
            struct draft_stage *stage = stages_of(draft, search->members[i]) + s;
            stage->deeper = (int16_t)(anew ? 0 : stage->deeper + by);
        }
    return 1;
}

/* Move some sequences from a pipeline to another one; where both stand for as many that are alike, of all. */
static int shift_share(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    const int32_t *sizes = search->problem->sizes;
    int32_t to = draw(search, draft->num_pipelines);
    if (to == p)
        return 0;
    struct draft_pipeline *a = &draft->pipelines[p], *b = &draft->pipelines[to];
    int32_t x = sizes[a->size], y = sizes[b->size], by = (x > y ? x : y) * (1 + draw(search, 3));
    if (by % x || by % y || a->num_micro_batches * x <= by)
        return 0;
    int32_t alike = 0;
    for (int32_t q = 0; q < draft->num_pipelines; q++)
        alike += q == to || are_alike(search, draft, to, q);
    if (count == 1 || count != alike || are_alike(search, draft, p, to)) {
        a->num_micro_batches -= by / x;
        b->num_micro_batches += by / y;
        return 1;
    }
    struct draft_pipeline target = *b;
    for (int32_t q = 0; q < draft->num_pipelines; q++)
        search->touched[q] = q == to || are_alike(search, draft, to, q);
    for (int32_t q = 0; q < draft->num_pipelines; q++)
        if (search->touched[q])
            draft->pipelines[q].num_micro_batches = target.num_micro_batches + by / y;
    for (int32_t i = 0; i < count; i++)
        draft->pipelines[search->members[i]].num_micro_batches -= by / x;
    return 1;
}

int move_little(struct search *search, struct draft *draft)
{
    int32_t p = draw(search, draft->num_pipelines), count = find_members(search, draft, p, 12);
    int32_t kind = draw(search, 100);
    if (draft->schedule == INTERLEAVED && kind < 25)
        return tilt(search, draft, p, count);
    if (kind < 50 || (draft->schedule != ONE_F_ONE_B && kind < 85))
        if (draft->pipelines[p].num_stages > 1)
            return shift_layers(search, draft, p, count);
    if (kind < 85 && draft->schedule == ONE_F_ONE_B)
        return deepen(search, draft, p, count);
    return shift_share(search, draft, p, count);
}

/* --- moves of the structure ------------------------------------------------------------------------------- */

static int change_size(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    const struct problem *problem = search->problem;
    int32_t place = draw(search, NUM_SIZES), size = problem->sizes[place], left = problem->global_batch_size;
    if (!size)
        return 0;
    if (draw(search, 4) == 0) {
        for (int32_t i = 0; i < count; i++) {
            struct draft_pipeline *pipeline = &draft->pipelines[search->members[i]];
            int32_t sequences = pipeline->num_micro_batches * problem->sizes[pipeline->size];
            if (sequences % size)
                return 0;
            pipeline->size = place;
            pipeline->num_micro_batches = sequences / size;
            touch(search, search->members[i]);
        }
        return 1;
    }
    if (left % size || left / size < draft->num_pipelines)
        return 0;
    (void)p;
    for (int32_t q = 0; q < draft->num_pipelines; q++) {
        struct draft_pipeline *pipeline = &draft->pipelines[q];
        double own = (double)pipeline->num_micro_batches * problem->sizes[pipeline->size] / size;
        pipeline->size = place;
        pipeline->num_micro_batches = own < 1.0 ? 1 : (int32_t)(own + 0.5);
        left -= pipeline->num_micro_batches * size;
        touch(search, q);
    }
    for (int32_t tries = 0; left && tries < 9999; tries++) {
        struct draft_pipeline *pipeline = &draft->pipelines[draw(search, draft->num_pipelines)];
        if (left > 0 || pipeline->num_micro_batches > 1) {
            pipeline->num_micro_batches += left > 0 ? 1 : -1;
            left -= left > 0 ? size : -size;
        }
    }
    return left == 0;
}

/* Exchange two stages of a pipeline, or put one elsewhere. */
static int reorder(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    int32_t stages = draft->pipelines[p].num_stages, a, b, exchanges = draw(search, 2), keeps = draw(search, 2);
    if (stages < 2 || (a = draw(search, stages)) == (b = draw(search, stages)))
        return 0;
    for (int32_t i = 0; i < count; i++) {
        struct draft_stage *own = stages_of(draft, search->members[i]), moved = own[a];
        touch(search, search->members[i]);
        if (exchanges) {
            int16_t layers = own[a].layers, other = own[b].layers;
            own[a] = own[b];
            own[b] = moved;
            if (keeps) {
                own[a].layers = layers;
                own[b].layers = other;
            }
            continue;
        }
        memmove(own + a, own + a + 1, sizeof *own * (size_t)(stages - a - 1));
        memmove(own + b + 1, own + b, sizeof *own * (size_t)(stages - 1 - b));
        own[b] = moved;
    }
    return 1 + draw(search, 2);
}

/* Put the cards of a stage's replicas into groups of another width. */
static int regroup(const struct search *search, struct draft_stage *stage, int32_t width, int32_t size)
{
    int16_t pools[MAX_REPLICAS];
    int32_t count = 0;
    for (int32_t r = 0; r < stage->num_replicas; r++) {
        int32_t cards = 0, is_first = 1;
        for (int32_t q = 0; q < stage->num_replicas; q++) {
            cards += stage->pools[q] == stage->pools[r] ? stage->width : 0;
            is_first &= q >= r || stage->pools[q] != stage->pools[r];
        }
        if (!is_first)
            continue;
        if (cards % width || !can_be(search, stage->pools[r], width, size))
            return 0;
        for (; cards; cards -= width) {
            if (count == MAX_REPLICAS)
                return 0;
            pools[count++] = stage->pools[r];
        }
    }
    memcpy(stage->pools, pools, sizeof(int16_t) * (size_t)count);
    stage->num_replicas = (int16_t)count;
    stage->width = (int16_t)width;
    return 1;
}

static int change_width(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    int32_t s = draw(search, draft->pipelines[p].num_stages), width = draw_width(search);
    if (stages_of(draft, p)[s].width == width)
        return 0;
    for (int32_t i = 0; i < count; i++) {
        int32_t member = search->members[i];
        if (!regroup(search, stages_of(draft, member) + s, width, draft->pipelines[member].size))
            return 0;
        touch(search, member);
    }
    return 1;
}

/* Make one stage of two neighbours: of groups twice as wide, or of more replicas. */
static int merge_stages(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    int32_t stages = draft->pipelines[p].num_stages, wider = draw(search, 2);
    if (stages < 2)
        return 0;
    int32_t s = draw(search, stages - 1);
    for (int32_t i = 0; i < count; i++) {
        int32_t member = search->members[i];
        struct draft_stage *a = stages_of(draft, member) + s, *b = a + 1;
        if (wider) {
            int32_t width = a->width + b->width;
            for (int32_t r = 0; r < a->num_replicas; r++)
                if (a->num_replicas != b->num_replicas || a->pools[r] != b->pools[r] ||
                    !can_be(search, a->pools[r], width, draft->pipelines[member].size))
                    return 0;
            a->width = (int16_t)width;
        } else {
            if (a->width != b->width || a->num_replicas + b->num_replicas > MAX_REPLICAS)
                return 0;
            memcpy(a->pools + a->num_replicas, b->pools, sizeof(int16_t) * (size_t)b->num_replicas);
            a->num_replicas = (int16_t)(a->num_replicas + b->num_replicas);
        }
        a->deeper = b->deeper;
        a->layers = (int16_t)(a->layers + b->layers);
        remove_stage(draft, member, s + 1);
        touch(search, member);
    }
    return 1;
}

/* Make two stages of one: half of its replicas each, or groups half as wide. */
static int divide_stage(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    int32_t s = draw(search, draft->pipelines[p].num_stages);
    for (int32_t i = 0; i < count; i++) {
        int32_t member = search->members[i];
        struct draft_stage *a = stages_of(draft, member) + s, b = *a;
        if (a->num_replicas > 1) {
            int32_t half = a->num_replicas / 2;
            b.num_replicas = (int16_t)(a->num_replicas - half);
            memcpy(b.pools, a->pools + half, sizeof(int16_t) * (size_t)b.num_replicas);
            a->num_replicas = (int16_t)half;
        } else if (a->width > 1) {
            a->width = b.width = (int16_t)(a->width / 2);
        } else {
            return 0;
        }
        b.layers = (int16_t)(a->layers / 2);
        a->layers = (int16_t)(a->layers - b.layers);
        if (!insert_stage(search, draft, member, s + 1, b))
            return 0;
        touch(search, member);
    }
    return 1;
}

static int leave_stage_out(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    if (draft->pipelines[p].num_stages < 2)
        return 0;
    int32_t s = draw(search, draft->pipelines[p].num_stages);
    for (int32_t i = 0; i < count; i++) {
        drop_stage(draft, search->members[i], s);
        touch(search, search->members[i]);
    }
    return 1 + draw(search, 2);
}

/* A pool with so many free cards, of a kind if it is not negative; -1 if there is none. */
static int32_t find_free(struct search *search, int32_t kind, int32_t width)
{
    int32_t found = -1, count = 0;
    for (int32_t i = 0; i < search->problem->num_pools; i++)
        if (search->free[i] >= width && (kind < 0 || search->problem->pools[i].kind == kind) &&
            draw(search, ++count) == 0)
            found = i;
    return found;
}

/* Give free cards to pipelines: as a stage more, as a replica more, or in place of a stage's own. */
static int use_free_cards(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    int32_t width = draw_width(search), stages = draft->pipelines[p].num_stages, s = draw(search, stages + 1);
    int32_t replaces = s < stages && draw(search, 3) == 0, joins = draw(search, 2);
    count_free(search, draft);
    int32_t pool = find_free(search, -1, width);
    if (pool < 0 || !can_be(search, pool, width, draft->pipelines[p].size))
        return 0;
    int32_t kind = search->problem->pools[pool].kind;
    for (int32_t i = 0; i < count; i++) {
        int32_t member = search->members[i];
        if (search->free[pool] < width && (pool = find_free(search, kind, width)) < 0)
            return 0;
        search->free[pool] -= width;
        struct draft_stage *own = stages_of(draft, member) + s;
        struct draft_stage stage = {.width = (int16_t)width, .num_replicas = 1, .share = 1.0};
        stage.pools[0] = (int16_t)pool;
        touch(search, member);
        if (replaces && joins && own->width == width && own->num_replicas < MAX_REPLICAS) {
            own->pools[own->num_replicas++] = (int16_t)pool;
        } else if (replaces) {
            stage.layers = own->layers;
            stage.deeper = own->deeper;
            *own = stage;
        } else if (!insert_stage(search, draft, member, s, stage)) {
            return 0;
        }
    }
    return 1;
}

/* Let stages keep state on their hosts, or not. */
static int change_offload(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    if (!search->space->may_offload)
        return 0;
    int32_t s = draw(search, draft->pipelines[p].num_stages), all = draw(search, 2), more = 1 + draw(search, 2);
    for (int32_t i = 0; i < count; i++) {
        struct draft_stage *own = stages_of(draft, search->members[i]);
        int16_t wanted = (int16_t)((own[s].may_offload + more) % NUM_OFFLOADS);
        for (int32_t t = 0; t < draft->pipelines[search->members[i]].num_stages; t++)
            if (all || t == s)
                own[t].may_offload = wanted;
    }
    return 2;
}

/* Let a stage send activations away, in another way, or no more. */
static void draw_sending(struct search *search, struct draft_stage *stage)
{
    static const int16_t most[] = {4, 8, 16, 32}, ahead[] = {1, 2, 4, 6};
    int32_t what = stage->sends ? draw(search, 6) : 0;
    if (what == 0) {
        stage->resident = most[draw(search, 4)];
        stage->ahead = ahead[draw(search, 4)];
        stage->sends = (int16_t)(1 + draw(search, 2));
    } else if (what == 1) {
        stage->sends = 0;
    } else if (what == 2) {
        stage->sends = (int16_t)(3 - stage->sends);
    } else if (what == 3) {
        stage->ahead = (int16_t)(draw(search, 2) || stage->ahead == 1 ? stage->ahead + 1 : stage->ahead - 1);
    } else if (what == 4) {
        stage->resident = (int16_t)(draw(search, 2) || stage->resident < 3 ? stage->resident + 1
                                                                           : stage->resident - 1);
    } else {
        stage->resident = (int16_t)(draw(search, 2) && stage->resident < 64 ? 2 * stage->resident
                                                                            : (stage->resident + 1) / 2);
    }
}

/* Send activations of stages to their hosts, or bring them back. */
static int change_sending(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    int32_t s = draw(search, draft->pipelines[p].num_stages), all = draw(search, 3) == 0, deals = draw(search, 3) == 0;
    struct draft_stage wanted = stages_of(draft, p)[s];
    draw_sending(search, &wanted);
    for (int32_t i = 0; i < count; i++) {
        struct draft_stage *own = stages_of(draft, search->members[i]);
        touch(search, search->members[i]);
        for (int32_t t = 0; t < draft->pipelines[search->members[i]].num_stages; t++)
            if (all || t == s) {
                own[t].sends = wanted.sends;
                own[t].resident = wanted.resident;
                own[t].ahead = wanted.ahead;
            }
    }
    return deals ? 1 : 2;
}

/* Change how much of the optimizer state of its layers a stage holds, beside their other owners. */
static int change_state_share(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    static const double factors[] = {0.5, 2.0, 0.8, 1.25, 0.95, 1.05, 0.99, 1.01};
    enum { STEPS = 1000 };
    int32_t s = draw(search, draft->pipelines[p].num_stages);
    double share = stages_of(draft, p)[s].share * factors[draw(search, 8)];
    if (!draft->is_sharded || has_virtual_stages(draft, &draft->pipelines[p]))
        return 0;
    share = draw(search, 8) ? floor(STEPS * share + 0.5) / STEPS : 1.0;
    for (int32_t i = 0; i < count; i++)
        stages_of(draft, search->members[i])[s].share = min_of(max_of(share, 1.0 / STEPS), 64.0);
    return 2;
}

static int change_sharding(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    (void)p, (void)count;
    draft->is_sharded = !draft->is_sharded;
    return search->space->shardings >> draft->is_sharded & 1 ? 2 : 0;
}

static int change_schedule(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    uint32_t others = (uint32_t)search->space->schedules & ~(1u << draft->schedule);
    (void)p, (void)count;
    if (draft->schedule == INTERLEAVED && (!others || draw(search, 2)))
        return change_rounds(search, draft) ? 2 : 0;
    return draw_schedule(search, draft, others) ? 2 : 0;
}

/* Exchange stages of two pipelines, or move one from one to the other. */
static int trade_stages(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    (void)count;
    int32_t q = draw(search, draft->num_pipelines);
    if (q == p)
        return 0;
    int32_t x = draw(search, draft->pipelines[p].num_stages), y = draw(search, draft->pipelines[q].num_stages);
    touch(search, p);
    touch(search, q);
    struct draft_stage *a = stages_of(draft, p) + x, *b = stages_of(draft, q) + y, moved = *a;
    if (draw(search, 2)) {
        moved.layers = b->layers;
        b->layers = a->layers;
        *a = *b;
        *b = moved;
        return 1;
    }
    if (draft->pipelines[p].num_stages < 2)
        return 0;
    drop_stage(draft, p, x);
    moved.layers = 0;
    if (!insert_stage(search, draft, q, draw(search, draft->pipelines[q].num_stages + 1), moved))
        return 0;
    return draw(search, 2) || deal_batch(search, draft);
}

/* Append pipeline q's stages to p's: end to end, in turns, or as replicas; q is empty then. */
static int join_two(struct search *search, struct draft *draft, int32_t p, int32_t q)
{
    struct draft_pipeline *a = &draft->pipelines[p], *b = &draft->pipelines[q];
    const int32_t *sizes = search->problem->sizes;
    int32_t sequences = a->num_micro_batches * sizes[a->size] + b->num_micro_batches * sizes[b->size];
    int32_t are_even = a->num_stages == b->num_stages, as_replicas = are_even && draw(search, 3) == 0;
    int32_t in_turns = are_even && draw(search, 2);
    if (sequences % sizes[a->size])
        return 0;
    for (int32_t s = 0; as_replicas && s < a->num_stages; s++) {
        const struct draft_stage *x = stages_of(draft, p) + s, *y = stages_of(draft, q) + s;
        as_replicas = x->width == y->width && x->num_replicas + y->num_replicas <= MAX_REPLICAS;
    }
    a->num_micro_batches = sequences / sizes[a->size];
    for (int32_t s = 0, count = b->num_stages; s < count; s++) {
        struct draft_stage moved = *stages_of(draft, q);
        if (as_replicas) {
            struct draft_stage *own = stages_of(draft, p) + s;
            memcpy(own->pools + own->num_replicas, moved.pools, sizeof(int16_t) * (size_t)moved.num_replicas);
            own->num_replicas = (int16_t)(own->num_replicas + moved.num_replicas);
        }
        remove_stage(draft, q, 0);
        moved.layers = 0;
        if (!as_replicas && !insert_stage(search, draft, p, in_turns ? 2 * s + 1 : a->num_stages, moved))
            return 0;
    }
    for (int32_t s = 0; s < a->num_stages; s++)
        stages_of(draft, p)[s].deeper = 0;
    touch(search, p);
    return 1;
}

static int join_pipelines(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    if (draft->num_pipelines < 2)
        return 0;
    int32_t pairs = count > 1 && draw(search, 3) ? count / 2 : 1;
    if (count == 1) {
        search->members[0] = p;
        search->members[1] = draw(search, draft->num_pipelines);
        if (search->members[1] == p)
            return 0;
    }
    for (int32_t i = 0; i < pairs; i++)
        if (!join_two(search, draft, search->members[2 * i], search->members[2 * i + 1]))
            return 0;
    for (int32_t q = draft->num_pipelines - 1; q >= 0; q--)
        if (!draft->pipelines[q].num_stages)
            remove_pipeline(search, draft, q);
    return draft->num_pipelines == 1 || draw(search, 2) || deal_batch(search, draft);
}

/* Put half of each stage's replicas, or some of its stages, into a pipeline of their own. */
static int part_pipeline(struct search *search, struct draft *draft, int32_t p, int32_t how, int32_t cut)
{
    int32_t added = add_pipeline(search, draft, p), stages = draft->pipelines[p].num_stages;
    if (added < 0)
        return 0;
    for (int32_t s = stages - 1; s >= 0; s--) {
        struct draft_stage *own = stages_of(draft, p) + s, moved = *own;
        if (how == 3) {
            int32_t half = own->num_replicas / 2;
            moved.num_replicas = (int16_t)half;
            memcpy(moved.pools, own->pools + half, sizeof(int16_t) * (size_t)half);
            own->num_replicas = (int16_t)half;
        } else if (how == 0 ? s % 2 : how == 1 ? s >= cut : draw(search, 2)) {
            drop_stage(draft, p, s);
        } else {
            continue;
        }
        moved.deeper = 0;
        if (!insert_stage(search, draft, added, 0, moved))
            return 0;
    }
    if (!draft->pipelines[p].num_stages || !draft->pipelines[added].num_stages)
        return 0;
    for (int32_t s = 0; s < draft->pipelines[p].num_stages; s++)
        stages_of(draft, p)[s].deeper = 0;
    touch(search, p);
    touch(search, added);
    return 1;
}

static int part_pipelines(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    int32_t stages = draft->pipelines[p].num_stages, how = draw(search, 2) ? 3 : draw(search, 3);
    for (int32_t s = 0; how == 3 && s < stages; s++)
        if (stages_of(draft, p)[s].num_replicas % 2)
            how = draw(search, 3);
    if (how != 3 && stages < 2)
        return 0;
    int32_t cut = stages > 1 ? 1 + draw(search, stages - 1) : 1;
    for (int32_t i = 0; i < count; i++)
        if (!part_pipeline(search, draft, search->members[i], how, cut))
            return 0;
    return how == 3 || how == 0 || deal_batch(search, draft);
}

static int share_anew(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    (void)p, (void)count;
    return draft->num_pipelines > 1 && deal_batch(search, draft) ? 2 : 0;
}

/* 0: nothing came of it; 1: layers are to be dealt anew; 2: they stay as they are. */
typedef int structural_move(struct search *, struct draft *, int32_t p, int32_t count);

static const struct {
    int32_t percent;
    structural_move *move;
} MOVES[] = {
    {8, change_size},   {15, reorder},         {8, change_width},    {9, merge_stages},    {8, divide_stage},
    {6, leave_stage_out}, {13, use_free_cards}, {2, change_offload}, {1, change_sharding}, {3, change_schedule},
    {12, trade_stages}, {6, join_pipelines},   {6, part_pipelines},  {3, share_anew},
};

/* What stages keep on cards and hosts, as far as the space has hosts. */
static structural_move *draw_tier_move(struct search *search)
{
    enum { PERCENT = 15 };
    const struct space *space = search->space;
    if (!(space->may_send || space->may_offload) || draw(search, 100) >= PERCENT)
        return NULL;
    int32_t kind = draw(search, 10);
    return kind < 6 && space->may_send ? change_sending : kind < 8 ? change_state_share : change_offload;
}

/* --- moves of all cards of a type -------------------------------------------------------------------------- */

static int has_type(const struct search *search, const struct draft_stage *stage, int32_t type)
{
    return search->problem->pools[stage->pools[0]].type == type;
}

/* Make one group of a stage's and those of others of the pipeline that are in the same pool; the stages after it. */
static void widen_stage(struct draft *draft, int32_t p, int32_t s, int32_t width)
{
    struct draft_stage *own = stages_of(draft, p) + s;
    int32_t missing = width / own->width - 1;
    for (int32_t i = s + 1; i < draft->pipelines[p].num_stages; i++) {
        const struct draft_stage *other = stages_of(draft, p) + i;
        missing -= other->num_replicas == 1 && other->width == own->width && other->pools[0] == own->pools[0];
    }
    if (missing > 0)
        return;
    missing = width / own->width - 1;
    for (int32_t i = draft->pipelines[p].num_stages - 1; i > s && missing; i--) {
        const struct draft_stage *other = stages_of(draft, p) + i;
        if (other->num_replicas == 1 && other->width == own->width && other->pools[0] == own->pools[0]) {
            remove_stage(draft, p, i);
            missing--;
        }
    }
    own->width = (int16_t)width;
}

/* Another width for all groups of a type. */
static int widen_type(struct search *search, struct draft *draft, int32_t p, int32_t type, int32_t width)
{
    for (int32_t s = 0; s < draft->pipelines[p].num_stages; s++) {
        struct draft_stage *own = stages_of(draft, p) + s, part;
        if (!has_type(search, own, type) || own->num_replicas > 1 || own->width == width)
            continue;
        if (!can_be(search, own->pools[0], width, draft->pipelines[p].size))
            return 0;
        if (own->width < width) {
            widen_stage(draft, p, s, width);
            continue;
        }
        int32_t parts = own->width / width;
        own->width = (int16_t)width;
        part = *own;
        part.layers = 0;
        for (int32_t i = 1; i < parts; i++)
            if (!insert_stage(search, draft, p, ++s, part))
                return 0;
    }
    return 1;
}

static int leave_type_out(struct search *search, struct draft *draft, int32_t p, int32_t type)
{
    for (int32_t s = draft->pipelines[p].num_stages - 1; s >= 0; s--)
        if (has_type(search, stages_of(draft, p) + s, type))
            remove_stage(draft, p, s);
    return draft->pipelines[p].num_stages > 0;
}

/* Put the stages of a type before all others, or after them. */
static int gather_type(struct search *search, struct draft *draft, int32_t p, int32_t type, int32_t at_end)
{
    struct draft_stage *own = stages_of(draft, p);
    int32_t stages = draft->pipelines[p].num_stages, place = 0;
    for (int32_t s = 0; s < stages; s++) {
        struct draft_stage moved = own[s];
        if (has_type(search, &moved, type) == at_end)
            continue;
        memmove(own + place + 1, own + place, sizeof moved * (size_t)(s - place));
        own[place++] = moved;
    }
    return place > 0 && place < stages;
}

int move_type(struct search *search, struct draft *draft)
{
    int32_t p = draw(search, draft->num_pipelines), count = find_members(search, draft, p, 10);
    const struct draft_stage *stage = stages_of(draft, p) + draw(search, draft->pipelines[p].num_stages);
    int32_t type = search->problem->pools[stage->pools[0]].type, kind = draw(search, 5);
    int32_t width = 1 << draw(search, 4), at_end = draw(search, 2), moved = 1;
    memset(search->touched, 0, sizeof(int32_t) * (size_t)(search->problem->num_cards + 1));
    for (int32_t i = 0; moved && i < count; i++) {
        int32_t member = search->members[i];
        touch(search, member);
        if (kind == 0)
            moved = leave_type_out(search, draft, member, type);
        else
            moved = kind == 1 ? gather_type(search, draft, member, type, at_end)
                              : widen_type(search, draft, member, type, width);
    }
    for (int32_t q = 0; moved && q < draft->num_pipelines; q++)
        if (search->touched[q])
            deal_layers(search, draft, q);
    return moved;
}

int move_much(struct search *search, struct draft *draft)
{
    if (is_large(search->problem) && draw(search, 5) == 0)
        return move_type(search, draft);
    int32_t p = draw(search, draft->num_pipelines), count = find_members(search, draft, p, 15);
    int32_t kind = draw(search, 100), i = 0;
    memset(search->touched, 0, sizeof(int32_t) * (size_t)(search->problem->num_cards + 1));
    while (kind >= MOVES[i].percent)
        kind -= MOVES[i++].percent;
    structural_move *move = draw_tier_move(search);
    int result = (move ? move : MOVES[i].move)(search, draft, p, count);
    for (int32_t q = 0; result && q < draft->num_pipelines; q++)
        if (search->touched[q])
            put_in_order(search, draft, q);
    for (int32_t q = 0; result == 1 && q < draft->num_pipelines; q++)
        if (search->touched[q])
            deal_layers(search, draft, q);
    return result;
}

/* --- starts ----------------------------------------------------------------------------------------------- */

/* Without the stages of a pipeline that have no room for a layer; whether one is left. */
static int drop_empty_stages(struct search *search, struct draft *draft, int32_t p)
{
    for (int32_t s = draft->pipelines[p].num_stages - 1; s >= 0; s--)
        if (!stages_of(draft, p)[s].layers)
            remove_stage(draft, p, s);
    if (draft->pipelines[p].num_stages)
        deal_layers(search, draft, p);
    return draft->pipelines[p].num_stages > 0;
}

/* How the cards of a type are dealt to pipelines. */
enum deal { TO_ONE, IN_RUNS, IN_TURNS };

/* Groups of the cards of a type, the largest nodes first, to the pipelines' ends. */
static void deal_type(struct search *search, struct draft *draft, int32_t type, int32_t width, enum deal deal,
                      int32_t runs_only_whole, int32_t takes_rest)
{
    const struct problem *problem = search->problem;
    int32_t *groups = search->groups, count = 0, target = draw(search, draft->num_pipelines);
    int32_t most = 0;
    for (int32_t i = 0; i < problem->num_pools; i++)
        most = problem->pools[i].count > most ? problem->pools[i].count : most;
    for (int32_t cards = most; cards; cards--)
        for (int32_t i = 0; i < problem->num_pools; i++) {
            if (problem->pools[i].type != type || problem->pools[i].count != cards)
                continue;
            int32_t left = cards;
            for (int32_t own = width; own && left; own = takes_rest || left == cards ? own / 2 : 0)
                for (; left >= own && (own == 1 || can_be(search, i, own, draft->pipelines[0].size)); left -= own) {
                    search->group_widths[count] = own;
                    groups[count++] = i;
                }
        }
    int32_t each = count / draft->num_pipelines;
    int32_t used = runs_only_whole ? each * draft->num_pipelines : count;
    for (int32_t i = 0; i < used; i++) {
        int32_t p = i % draft->num_pipelines;
        if (deal == TO_ONE)
            p = target;
        else if (deal == IN_RUNS && each && i / each < draft->num_pipelines)
            p = i / each;
        struct draft_stage stage = {.width = (int16_t)search->group_widths[i], .num_replicas = 1, .share = 1.0};
        stage.pools[0] = (int16_t)groups[i];
        insert_stage(search, draft, p, draft->pipelines[p].num_stages, stage);
    }
}

/* Make stages of several replicas of runs of groups that are alike. */
static void gather_replicas(struct search *search, struct draft *draft, int32_t most)
{
    const struct pool *pools = search->problem->pools;
    for (int32_t p = 0; p < draft->num_pipelines; p++)
        for (int32_t s = 0; s + 1 < draft->pipelines[p].num_stages;) {
            struct draft_stage *a = stages_of(draft, p) + s, *b = a + 1;
            if (a->num_replicas == most || a->width != b->width ||
                pools[a->pools[0]].type != pools[b->pools[0]].type) {
                s++;
                continue;
            }
            a->pools[a->num_replicas++] = b->pools[0];
            remove_stage(draft, p, s + 1);
        }
}

static void deal_types(struct search *search, struct draft *draft, int32_t is_frugal)
{
    const struct problem *problem = search->problem;
    int32_t is_wide = is_frugal && is_large(problem);
    int32_t types = 0, is_even = draw(search, 3), one_width = draw(search, 2) ? draw_width(search) : 0;
    for (int32_t i = 0; i < problem->num_pools; i++)
        if (problem->pools[i].type >= types)
            types = problem->pools[i].type + 1;
    int32_t *order = search->members;
    for (int32_t i = 0; i < types; i++) {
        int32_t j = draw(search, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (int32_t i = 0; i < types; i++) {
        int32_t how = is_even ? 2 + 2 * draw(search, 2) : draw(search, 5);
        int32_t width = is_wide ? 4 << draw(search, 3) : one_width ? one_width : draw_width(search);
        if (!is_frugal && !search->space->uses_all && draw(search, 10) == 0)
            continue;
        enum deal deal = how == 0 ? TO_ONE : how < 4 ? IN_RUNS : IN_TURNS;
        deal_type(search, draft, order[i], width, deal, how > 1 && !search->space->uses_all, is_frugal && !is_wide);
    }
}

/* Whether a draft is drawn that takes little memory, where the state of few copies of the model has room: of few
 * pipelines with wide groups, one a stage, of all cards. */
static int32_t draw_frugal(struct search *search)
{
    enum { FEW = 4 };
    return search->most_copies && search->most_copies <= FEW && draw(search, 2);
}

int draw_start(struct search *search, struct draft *draft)
{
    static const int32_t counts[] = {1, 1, 2, 2, 2, 3, 4, 4, 6, 8, 12, 16};
    const struct problem *problem = search->problem;
    int32_t size = draw(search, NUM_SIZES), pipelines = counts[draw(search, 12)];
    if (!problem->sizes[size] || problem->global_batch_size % problem->sizes[size])
        return 0;
    if (size > 2 && draw(search, 3))
        return 0;
    int32_t total = problem->global_batch_size / problem->sizes[size];
    int32_t frugal = draw_frugal(search);
    if (search->most_copies && pipelines > search->most_copies)
        pipelines = search->most_copies;
    if (pipelines > total || pipelines > problem->num_cards)
        return 0;
    draft->schedule = draw(search, 3) ? ONE_F_ONE_B : ZERO_BUBBLE;
    uint32_t others = (uint32_t)search->space->schedules & ~(1u << ONE_F_ONE_B | 1u << ZERO_BUBBLE);
    if (!(search->space->schedules >> draft->schedule & 1))
        draft->schedule = ONE_F_ONE_B + ZERO_BUBBLE - draft->schedule;
    if (others && (!(search->space->schedules >> draft->schedule & 1) || draw(search, 3) == 0))
        draw_schedule(search, draft, others);
    draft->is_sharded = frugal || draw(search, 4) != 0;
    if (!(search->space->shardings >> draft->is_sharded & 1))
        draft->is_sharded = !draft->is_sharded;
    draft->num_pipelines = pipelines;
    draft->num_stages = 0;
    for (int32_t p = 0; p < pipelines; p++)
        draft->pipelines[p] = (struct draft_pipeline){size, total / pipelines + (p < total % pipelines), 0, 0};
    deal_types(search, draft, frugal);
    /* Where there are hosts, cards alone were searched before. */
    int32_t offloads = !search->space->may_offload ? 0 : frugal ? 1 + draw(search, 2) : draw(search, 4);
    int16_t may_offload = (int16_t)(offloads < NUM_OFFLOADS ? offloads : NO_OFFLOAD);
    struct draft_stage wanted = {0};
    if (search->space->may_send && draw(search, 3))
        draw_sending(search, &wanted);
    for (int32_t s = 0; s < draft->num_stages; s++) {
        draft->stages[s].may_offload = may_offload;
        draft->stages[s].sends = wanted.sends;
        draft->stages[s].resident = wanted.resident;
        draft->stages[s].ahead = wanted.ahead;
    }
    if (!frugal && draw(search, 3) == 0)
        gather_replicas(search, draft, 2 + draw(search, 3));
    for (int32_t p = draft->num_pipelines - 1; p >= 0; p--)
        if (!draft->pipelines[p].num_stages)
            remove_pipeline(search, draft, p);
    if (!draft->num_pipelines)
        return 0;
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        put_in_order(search, draft, p);
        deal_layers(search, draft, p);
    }
    if (search->space->counts || search->space->is_even)
        return total % pipelines == 0;
    if (!deal_batch(search, draft))
        return 0;
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        deal_layers(search, draft, p);
        if (search->most_copies && !search->space->uses_all && !drop_empty_stages(search, draft, p))
            return 0;
    }
    return 1;
}

/* --- forms that search keys ask for ----------------------------------------------------------------------- */

void put_in_order(const struct search *search, struct draft *draft, int32_t p)
{
    struct draft_stage *stages = stages_of(draft, p);
    for (int32_t s = 0; search->space->is_ordered && s < draft->pipelines[p].num_stages; s++) {
        struct draft_stage moved = stages[s];
        int32_t to = s;
        for (int32_t r = 1; r < moved.num_replicas; r++)
            for (int32_t q = r; q > 0 && moved.pools[q] < moved.pools[q - 1]; q--) {
                int16_t pool = moved.pools[q];
                moved.pools[q] = moved.pools[q - 1];
                moved.pools[q - 1] = pool;
            }
        for (; to > 0 && stages[to - 1].pools[0] > moved.pools[0]; to--)
            stages[to] = stages[to - 1];
        stages[to] = moved;
    }
}

static int is_even(const struct draft *draft)
{
    const struct draft_pipeline *first = &draft->pipelines[0];
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        if (pipeline->size != first->size || pipeline->num_micro_batches != first->num_micro_batches ||
            pipeline->num_stages != first->num_stages)
            return 0;
        for (int32_t s = 0; s < first->num_stages; s++) {
            const struct draft_stage *stage = stages_of(draft, p) + s, *other = &draft->stages[s];
            if (stage->num_replicas > 1 || stage->width != draft->stages[0].width || stage->layers != other->layers ||
                stage->tilt != other->tilt || stage->deeper)
                return 0;
        }
    }
    /* Virtual stages of several workers, whose micro-batches come out even. */
    return draft->schedule != INTERLEAVED || first->num_micro_batches % first->num_stages == 0;
}

int keeps_form(const struct search *search, const struct draft *draft)
{
    const struct space *space = search->space;
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        if (space->counts && !space->counts[pipeline->num_micro_batches])
            return 0;
        for (int32_t s = 1; space->is_ordered && s < pipeline->num_stages; s++)
            if (stages_of(draft, p)[s].pools[0] < stages_of(draft, p)[s - 1].pools[0])
                return 0;
    }
    return !space->is_even || is_even(draft);
}
