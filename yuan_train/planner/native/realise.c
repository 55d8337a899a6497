/* What of a draft follows from the rest: depths that are lawful, recompute and state on hosts where memory is short,
 * layers and shares of the batch by speed. */
#include <math.h>

#include "search.h"

static int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* A stage's depth is in whole rounds of its replicas, and not less than the next one's. */
static void find_lawful_depths(const struct search *search, const struct draft *draft,
                               const struct draft_pipeline *pipeline)
{
    int32_t after = 0, rest = 0, own_depths = pipeline->num_stages == 1 || search->space->is_plain;
    for (int32_t s = pipeline->num_stages - 1; s >= 0; s--) {
        struct draft_stage *stage = &draft->stages[pipeline->first_stage + s];
        int32_t n = stage->num_replicas;
        rest += n;
        after = larger(larger(rest + stage->deeper, n), (after + n - 1) / n * n);
        stage->depth = (int16_t)(draft->schedule == ONE_F_ONE_B && after != rest && !own_depths ? after : 0);
    }
}

/* The fewest layers, of a kind of recompute, with which a stage fits; 0 if none do. */
static int32_t least_recomputed(struct search *search, struct draft *draft, int32_t p, int32_t s, int32_t kind)
{
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    struct draft_stage *stage = &draft->stages[pipeline->first_stage + s];
    const struct stage_price *price = &search->evaluator->prices[pipeline->first_stage + s];
    int32_t low = 1, high = stage->layers;
    stage->recompute = (int16_t)kind;
    stage->num_recomputed = stage->layers;
    if (price_stage(search->evaluator, draft, p, s) || price->memory > price->capacity)
        return 0;
    while (low < high) {
        int32_t middle = (low + high) / 2;
        stage->num_recomputed = (int16_t)middle;
        price_stage(search->evaluator, draft, p, s);
        if (price->memory <= price->capacity)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Put as much of a stage's optimizer state on its hosts as makes it fit, in thousandths; all of it if need be. */
static void offload_some(struct search *search, struct draft *draft, int32_t p, int32_t s)
{
    int32_t number = draft->pipelines[p].first_stage + s;
    struct draft_stage *stage = &draft->stages[number];
    const struct stage_price *price = &search->evaluator->prices[number];
    double needed = price->memory - price->capacity, before = price->memory;
    stage->offload = 1.0;
    price_stage(search->evaluator, draft, p, s);
    double most = before - price->memory;
    if (most <= 0.0)
        stage->offload = 0.0;
    else if (needed < most)
        stage->offload = min_of(1.0, ceil(1000.0 * needed / most) / 1000.0);
    /* What the hosts have no room for has to be recomputed instead. */
    if (search->fills_cards && price->disk_bytes <= 0.0 && price->host_bytes > 0.0)
        stage->offload = min_of(stage->offload, floor(1000.0 * price->host_capacity / price->host_bytes) / 1000.0);
}

static double mean_of_layers(const struct problem *problem, const double *sums)
{
    return (sums[problem->num_units - 1] - sums[1]) / (problem->num_units - 2);
}

/* Send the activations of as few layers as let a stage fit, or those of all; 1 if it fits. How much stays of what leaves
 * is known when its copies are placed: first it is taken to be as much as `resident` parts keep. */
static int send_some(struct search *search, struct draft *draft, int32_t p, int32_t s)
{
    enum { TRIES = 3 };
    int32_t number = draft->pipelines[p].first_stage + s;
    struct draft_stage *stage = &draft->stages[number];
    const struct stage_price *price = &search->evaluator->prices[number];
    stage->recompute = (int16_t)(stage->sends - 1);
    stage->num_recomputed = stage->recompute ? stage->layers : 0;
    if (!(search->space->recomputes >> stage->recompute & 1) || price_stage(search->evaluator, draft, p, s))
        return 0;
    double over = price->memory - price->capacity;
    if (over <= 0.0)
        return 1;
    const struct unit_table *table =
        table_of(search->problem, price->place, stage->width, draft->pipelines[p].size, stage->recompute);
    double each = mean_of_layers(search->problem, table->activation_bytes);
    double least = ceil((over + 0.5 * stage->resident * each) / (price->in_flight * each));
    stage->away = (int16_t)(least < stage->layers ? least : stage->layers);
    for (int32_t tries = 0; tries < TRIES && !price_stage(search->evaluator, draft, p, s); tries++) {
        if (price->memory <= price->capacity || stage->away == stage->layers)
            return price->memory <= price->capacity;
        stage->away++;
    }
    stage->away = 0;
    return 0;
}

int fit_stage(struct search *search, struct draft *draft, int32_t p, int32_t s)
{
    int32_t number = draft->pipelines[p].first_stage + s;
    struct draft_stage *stage = &draft->stages[number];
    const struct stage_price *price = &search->evaluator->prices[number];
    stage->recompute = stage->num_recomputed = 0;
    stage->offload = 0.0;
    if (price_stage(search->evaluator, draft, p, s))
        return 1;
    if (price->memory <= price->capacity && (search->space->recomputes & 1))
        return 0;
    if (stage->sends && search->space->may_send && stage->layers && price->memory > price->capacity &&
        !has_virtual_stages(draft, &draft->pipelines[p])) {
        if (send_some(search, draft, p, s))
            return 0;
        if (!stage->may_offload)
            stage->away = 0;
        if (!stage->away)
            stage->recompute = stage->num_recomputed = 0;
        price_stage(search->evaluator, draft, p, s);
    }
    if (stage->may_offload == AFTER_RECOMPUTE && search->space->may_offload && stage->layers) {
        int32_t kind = search->space->recomputes >> 2 & 1 ? 2 : search->space->recomputes >> 1 & 1;
        stage->away = 0;
        stage->recompute = (int16_t)kind;
        stage->num_recomputed = kind ? stage->layers : 0;
        if (!price_stage(search->evaluator, draft, p, s) && price->memory > price->capacity) {
            offload_some(search, draft, p, s);
            return price_stage(search->evaluator, draft, p, s);
        }
    } else if (stage->may_offload && search->space->may_offload && price->memory > price->capacity) {
        offload_some(search, draft, p, s);
        price_stage(search->evaluator, draft, p, s);
        if (price->memory <= price->capacity && (stage->away || (search->space->recomputes & 1)))
            return 0;
    }
    stage->away = 0;
    int32_t best = 0, count = 0;
    double fastest = INFINITY;
    for (int32_t kind = 1; kind < NUM_RECOMPUTES && stage->layers; kind++) {
        if (!(search->space->recomputes >> kind & 1))
            continue;
        int32_t own = least_recomputed(search, draft, p, s, kind);
        if (own && (search->space->is_plain || !(search->space->recomputes & 1)))
            own = stage->layers;
        stage->num_recomputed = (int16_t)own;
        if (!own || price_stage(search->evaluator, draft, p, s) || price->forward + price->backward >= fastest)
            continue;
        fastest = price->forward + price->backward;
        best = kind;
        count = own;
    }
    if (!best && stage->layers && !(search->space->recomputes & 1)) {
        /* It fits under no kind that may be, though it may without recompute, which needs less at a depth of one. */
        best = search->space->recomputes >> 2 & 1 ? 2 : 1;
        count = stage->layers;
    }
    stage->recompute = (int16_t)best;
    stage->num_recomputed = (int16_t)count;
    if (stage->offload > 0.0) {
        /* Recomputed layers leave room that no state on hosts has to make. */
        stage->offload = 0.0;
        if (!price_stage(search->evaluator, draft, p, s) && price->memory > price->capacity)
            offload_some(search, draft, p, s);
    }
    return price_stage(search->evaluator, draft, p, s);
}

/* All that the fit of a stage which sends nothing away follows from, in one space: pools by their kinds. */
struct fit_key {
    double optimizer_share, packed_share, copied_share;
    int32_t first_unit, end_unit, in_flight, size, is_alone, layers, width, num_replicas, may_offload;
    int32_t kinds[MAX_REPLICAS];
};

/* How such a stage was fitted, and what that takes. */
struct fit {
    struct fit_key key;
    int32_t is_known, failed, slowest; /* `slowest`: which of the replicas */
    int16_t recompute, num_recomputed;
    double offload;
    struct stage_price price;
};

enum { NUM_FITS = 4096 };

size_t size_of_fits(void)
{
    return NUM_FITS * sizeof(struct fit);
}

static struct fit *find_fit(struct search *search, const struct draft *draft, const struct draft_pipeline *pipeline,
                            int32_t number, struct fit_key *key)
{
    const struct draft_stage *stage = &draft->stages[number];
    const struct stage_price *price = &search->evaluator->prices[number];
    uint64_t hash = 14695981039346656037ull, word;
    memset(key, 0, sizeof *key);
    key->optimizer_share = price->optimizer_share;
    key->packed_share = price->packed_share;
    key->copied_share = price->copied_share;
    key->first_unit = price->first_unit;
    key->end_unit = price->end_unit;
    key->in_flight = price->in_flight;
    key->size = pipeline->size;
    key->is_alone = pipeline->num_stages == 1;
    key->layers = stage->layers;
    key->width = stage->width;
    key->num_replicas = stage->num_replicas;
    key->may_offload = stage->may_offload;
    for (int32_t r = 0; r < stage->num_replicas; r++)
        key->kinds[r] = search->problem->pools[stage->pools[r]].kind;
    for (size_t i = 0; i < sizeof *key; i += sizeof word) {
        memcpy(&word, (const char *)key + i, sizeof word);
        hash = (hash ^ word) * 1099511628211ull;
    }
    return &search->fits[(hash >> 32) % NUM_FITS];
}

/* As `fit_stage`, once for stages that are alike. Where links were measured, places tell cards of a kind apart. */
static int fit_once(struct search *search, struct draft *draft, int32_t p, int32_t s)
{
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    int32_t number = pipeline->first_stage + s;
    struct draft_stage *stage = &draft->stages[number];
    struct evaluator *evaluator = search->evaluator;
    struct stage_price *price = &evaluator->prices[number];
    struct fit_key key;
    if (!search->fits || search->problem->is_measured || (stage->sends && search->space->may_send))
        return fit_stage(search, draft, p, s);
    struct fit *fit = find_fit(search, draft, pipeline, number, &key);
    const int32_t *places = &evaluator->place_of[evaluator->first_replica[number]];
    if (fit->is_known && !memcmp(&fit->key, &key, sizeof key)) {
        *price = fit->price;
        price->slowest = stage->pools[fit->slowest];
        price->place = places[fit->slowest];
        stage->recompute = fit->recompute;
        stage->num_recomputed = fit->num_recomputed;
        stage->offload = fit->offload;
        return fit->failed;
    }
    int failed = fit_stage(search, draft, p, s);
    int32_t slowest = 0;
    while (!failed && (places[slowest] != price->place || stage->pools[slowest] != price->slowest))
        slowest++;
    *fit = (struct fit){key, 1, failed, slowest, stage->recompute, stage->num_recomputed, stage->offload, *price};
    return failed;
}

int realise_draft(struct search *search, struct draft *draft)
{
    struct evaluator *evaluator = search->evaluator;
    for (int32_t s = 0; s < draft->num_stages; s++)
        draft->stages[s].away = 0;
    for (int32_t p = 0; p < draft->num_pipelines; p++)
        find_lawful_depths(search, draft, &draft->pipelines[p]);
    if (find_holders(evaluator, draft))
        return 1;
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        if (find_in_flight(evaluator, draft, &draft->pipelines[p]))
            return 1;
        int is_virtual = has_virtual_stages(draft, &draft->pipelines[p]);
        if (is_virtual && fit_workers(search, draft, p))
            return 1;
        for (int32_t s = 0; !is_virtual && s < draft->pipelines[p].num_stages; s++)
            if (fit_once(search, draft, p, s))
                return 1;
    }
    return 0;
}

/* What a stage takes while layers are dealt to it. */
struct dealt {
    double seconds, least_seconds; /* of a layer, without recompute and with the most of it */
    double bytes, least_bytes;     /* the same */
    double some_seconds, some_bytes; /* with the least recompute that there is */
    double ends, room;             /* seconds of embedding and head; bytes that are there for layers */
    double host_room, host_bytes;  /* bytes of cards that hosts spare, and of a layer's state there; 0: not asked */
    double next;                   /* seconds with one layer more */
    int32_t layers, num_replicas;
};

/* The unit's bytes on a card with so much of the optimizer's state. */
static double unit_bytes(const struct unit_table *table, int32_t u, double share, int32_t in_flight)
{
    return table->parameter_bytes[u + 1] - table->parameter_bytes[u] + table->gradient_bytes[u + 1] -
           table->gradient_bytes[u] + share * (table->optimizer_bytes[u + 1] - table->optimizer_bytes[u]) +
           in_flight * (table->activation_bytes[u + 1] - table->activation_bytes[u]) + table->transient[u];
}

/* The tables of a stage's slowest replica, and the room of its tightest; 0 if it cannot be. */
static int find_slowest(struct search *search, const struct draft_stage *stage, int32_t size,
                        const struct unit_table **plain, const struct unit_table **least, struct dealt *dealt)
{
    const struct problem *problem = search->problem;
    int32_t kind = search->space->recomputes >> 2 & 1 ? 2 : search->space->recomputes >> 1 & 1;
    *plain = NULL;
    for (int32_t r = 0; r < stage->num_replicas; r++) {
        const struct pool *pool = &problem->pools[stage->pools[r]];
        const struct unit_table *own = table_of(problem, pool->first_place, stage->width, size, 0);
        if (!own)
            return 0;
        double seconds = mean_of_layers(problem, own->forward) + mean_of_layers(problem, own->backward);
        if (seconds > dealt->seconds) {
            dealt->seconds = seconds;
            *plain = own;
            *least = table_of(problem, pool->first_place, stage->width, size, kind);
        }
        dealt->room = min_of(dealt->room, pool->limit - pool->reserved);
        dealt->host_room = min_of(dealt->host_room, (pool->host_bytes + pool->disk_bytes) / pool->host_bytes_each);
    }
    return *plain && *least;
}

/* The tables of selective recompute on the cards of `plain`, where it may be; else those of `least`. */
static const struct unit_table *least_recompute(const struct search *search, const struct draft_stage *stage,
                                                int32_t size, const struct unit_table *plain,
                                                const struct unit_table *least)
{
    const struct problem *problem = search->problem;
    for (int32_t r = 0; r < stage->num_replicas && (search->space->recomputes >> 1 & 1); r++) {
        int32_t place = problem->pools[stage->pools[r]].first_place;
        if (table_of(problem, place, stage->width, size, 0) == plain)
            return table_of(problem, place, stage->width, size, 1);
    }
    return least;
}

static void begin_dealing(struct search *search, const struct draft *draft, int32_t p, int32_t s, int32_t in_flight,
                          struct dealt *dealt)
{
    const struct problem *problem = search->problem;
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    const struct draft_stage *stage = &draft->stages[pipeline->first_stage + s];
    const struct unit_table *plain = NULL, *least = NULL;
    double share = draft->is_sharded ? 1.0 / (problem->num_islands * draft->num_pipelines * stage->num_replicas) : 1.0;
    *dealt = (struct dealt){.num_replicas = stage->num_replicas, .room = INFINITY, .host_room = INFINITY};
    if (!find_slowest(search, stage, pipeline->size, &plain, &least, dealt)) {
        dealt->room = 0.0;
        dealt->bytes = dealt->least_bytes = 1.0;
        return;
    }
    if (stage->may_offload && search->space->may_offload) {
        double optimizer = mean_of_layers(problem, plain->optimizer_bytes);
        dealt->host_bytes = search->fills_cards ? share * optimizer : 0.0;
        dealt->host_room *= optimizer / mean_of_layers(problem, plain->parameters);
        share = 0.0;
    }
    int32_t kept = stage->sends && search->space->may_send ? 0 : in_flight;
    dealt->least_seconds = mean_of_layers(problem, least->forward) + mean_of_layers(problem, least->backward);
    double state = mean_of_layers(problem, plain->parameter_bytes) +
                   mean_of_layers(problem, plain->gradient_bytes) +
                   share * mean_of_layers(problem, plain->optimizer_bytes);
    dealt->bytes = state + in_flight * mean_of_layers(problem, plain->activation_bytes);
    dealt->least_bytes = state + kept * mean_of_layers(problem, least->activation_bytes);
    const struct unit_table *some = least_recompute(search, stage, pipeline->size, plain, least);
    dealt->some_seconds = mean_of_layers(problem, some->forward) + mean_of_layers(problem, some->backward);
    dealt->some_bytes = state + kept * mean_of_layers(problem, some->activation_bytes);
    dealt->room -= plain->transient[1] + plain->boundary_bytes * (in_flight + 4);
    int32_t ends[2] = {s ? -1 : 0, s == pipeline->num_stages - 1 ? problem->num_units - 1 : -1};
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0) {
            int32_t u = ends[i];
            dealt->room -= unit_bytes(plain, u, share, in_flight);
            dealt->ends +=
                plain->forward[u + 1] - plain->forward[u] + plain->backward[u + 1] - plain->backward[u];
        }
}

/* Of a micro-batch, by replica; much more where there is no room. */
static double seconds_with(const struct dealt *dealt, int32_t layers)
{
    double over = layers * dealt->bytes - dealt->room, more = INFINITY;
    if (layers * dealt->least_bytes > dealt->room)
        return MISFIT * (1.0 + layers * dealt->least_bytes / max_of(dealt->room, 1.0));
    double whole = layers * (dealt->least_bytes + dealt->host_bytes), whole_room = dealt->room + dealt->host_room;
    if (dealt->host_bytes > 0.0 && whole > whole_room)
        return MISFIT * (1.0 + whole / max_of(whole_room, 1.0));
    /* As many layers are recomputed as need be, of the kind that takes less for it. */
    const double kinds[2][2] = {{dealt->least_seconds, dealt->least_bytes}, {dealt->some_seconds, dealt->some_bytes}};
    for (int i = 0; i < 2 && over > 0.0; i++) {
        double saved = dealt->bytes - kinds[i][1];
        if (saved * layers >= over)
            more = min_of(more, ceil(over / saved) * (kinds[i][0] - dealt->seconds));
    }
    more = over > 0.0 ? more : 0.0;
    return (dealt->ends + layers * dealt->seconds + more) / dealt->num_replicas;
}

void deal_layers(struct search *search, struct draft *draft, int32_t p)
{
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    int32_t stages = pipeline->num_stages, rest = 0, all = 0;
    struct dealt *dealt = search->dealt;
    for (int32_t s = 0; s < stages; s++)
        all += draft->stages[pipeline->first_stage + s].num_replicas;
    for (int32_t s = stages - 1; s >= 0; s--) {
        const struct draft_stage *stage = &draft->stages[pipeline->first_stage + s];
        int32_t n = stage->num_replicas, most = (pipeline->num_micro_batches + n - 1) / n;
        rest += n;
        int32_t in_flight = (expected_depth(draft, pipeline, s, rest, all) + n - 1) / n;
        begin_dealing(search, draft, p, s, in_flight < most ? in_flight : most, &dealt[s]);
    }
    for (int32_t s = 0; s < stages; s++)
        dealt[s].next = seconds_with(&dealt[s], 1);
    for (int32_t layer = 0; layer < search->problem->num_units - 2; layer++) {
        int32_t best = 0;
        for (int32_t s = 1; s < stages; s++)
            if (dealt[s].next < dealt[best].next)
                best = s;
        dealt[best].layers++;
        dealt[best].next = seconds_with(&dealt[best], dealt[best].layers + 1);
    }
    for (int32_t s = 0; s < stages; s++)
        draft->stages[pipeline->first_stage + s].layers = (int16_t)dealt[s].layers;
}

/* Seconds of a sequence on the busiest stage of a pipeline. */
static double period(struct search *search, const struct draft *draft, int32_t p)
{
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    double longest = 0.0;
    for (int32_t s = 0; s < pipeline->num_stages; s++) {
        struct dealt dealt;
        begin_dealing(search, draft, p, s, 1, &dealt);
        double own = dealt.ends + draft->stages[pipeline->first_stage + s].layers * dealt.seconds;
        longest = max_of(longest, own / dealt.num_replicas);
    }
    return longest / search->problem->sizes[pipeline->size];
}

int deal_batch(struct search *search, struct draft *draft)
{
    const struct problem *problem = search->problem;
    double total = 0.0, *speeds = search->speeds;
    int32_t left = problem->global_batch_size;
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        double own = period(search, draft, p);
        total += speeds[p] = own > 0.0 ? 1.0 / own : 0.0;
    }
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        struct draft_pipeline *pipeline = &draft->pipelines[p];
        int32_t size = problem->sizes[pipeline->size];
        int32_t count = (int32_t)(problem->global_batch_size * speeds[p] / total / size);
        pipeline->num_micro_batches = larger(count, 1);
        left -= pipeline->num_micro_batches * size;
    }
    for (int32_t tries = 0; left && tries < 4000; tries++) {
        struct draft_pipeline *pipeline = &draft->pipelines[draw(search, draft->num_pipelines)];
        int32_t size = problem->sizes[pipeline->size];
        if (left >= size) {
            pipeline->num_micro_batches++;
            left -= size;
        } else if (left < 0 && pipeline->num_micro_batches > 1) {
            pipeline->num_micro_batches--;
            left += size;
        }
    }
    return left == 0;
}

size_t size_of_dealt(void)
{
    return sizeof(struct dealt);
}
