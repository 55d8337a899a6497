/* What the parts of the search share. */
#ifndef YUAN_SEARCH_H
#define YUAN_SEARCH_H

#include "evaluator.h"

struct dealt;
struct fit;

struct search {
    struct evaluator *evaluator;
    const struct problem *problem;
    const struct space *space;
    uint64_t random;
    int64_t spent; /* of the budget */
    double end;    /* when all counts as spent if a draft is found */
    int32_t most_copies; /* of the model that random drafts may have; 0: any number */
    int32_t fills_cards; /* whether its state alone is more than all cards hold, so that room on hosts counts too */
    struct arena arena;
    int32_t *free;    /* [pools]: cards that a draft does not use */
    int32_t *members; /* [cards]: pipelines that a move changes together */
    int32_t *touched; /* [cards]: pipelines whose layers are dealt anew */
    int32_t *groups, *group_widths; /* [cards]: of a type, while starts are made */
    struct fit *fits;          /* of stages that were fitted before, see `realise.c`; NULL: not kept */
    struct dealt *dealt;       /* [cards], of one pipeline's stages; see `realise.c` */
    double *speeds;            /* [cards], of pipelines */
    struct draft candidate, other, best, unfolded;
    struct found *found;
};

/* Whether there are so many cards that moves change all of a type at once. */
static inline int is_large(const struct problem *problem)
{
    enum { MANY_CARDS = 57 };
    return problem->num_cards * problem->num_islands >= MANY_CARDS;
}

/* A number from 0 to n - 1, and one from 0 to 1. */
int32_t draw(struct search *search, int32_t n);
double draw_share(struct search *search);

size_t size_of_dealt(void);
size_t size_of_fits(void);
void copy_draft(struct draft *to, const struct draft *from);
struct draft take_draft(const struct problem *problem, struct arena *arena);

/* Depths, recompute and state on hosts of a draft, as its memory needs them; 0, or 1 if it cannot be. */
int realise_draft(struct search *search, struct draft *draft);
/* The fastest way in which stage s fits, if it does in any, its holders and micro-batches in flight being known; 0, or 1
 * if it cannot be. */
int fit_stage(struct search *search, struct draft *draft, int32_t p, int32_t s);
/* The step of a draft, which is realised; above MISFIT if it does not fit, IMPOSSIBLE if it cannot be or takes longer than
 * `limit`, which is told long before it is priced. */
double step_of(struct search *search, struct draft *draft, double limit);
/* Deal the layers of pipeline p to the stages that are least busy and have room. */
void deal_layers(struct search *search, struct draft *draft, int32_t p);
/* Deal the batch to the pipelines by their speed; 0 if it does not come out even. */
int deal_batch(struct search *search, struct draft *draft);

/* Virtual stages of a worker, at most: `most_stages` of `evaluate.h` has room for them. */
enum { MAX_ROUNDS = 3 };

/* Each worker's stages as one, and back; 1 if the draft has not its workers in rounds, too few layers for them, or not
 * a worker with several stages. */
int fold_draft(const struct draft *draft, struct draft *folded);
int unfold_draft(const struct draft *draft, struct draft *unfolded);
/* Micro-batches in flight of stage s, of whose pipeline it and those after it have `rest` of `all` replicas. */
int32_t expected_depth(const struct draft *draft, const struct draft_pipeline *pipeline, int32_t s, int32_t rest,
                       int32_t all);
/* Recompute and state on hosts of the workers of pipeline p; 1 if it cannot be. */
int fit_workers(struct search *search, struct draft *draft, int32_t p);
/* Moves; `draw_schedule` takes one of a set. */
int tilt(struct search *search, struct draft *draft, int32_t p, int32_t count);
int change_rounds(struct search *search, struct draft *draft);
int draw_schedule(struct search *search, struct draft *draft, uint32_t others);

/* Whether a draft keeps to the space's order, counts and evenness; and putting stages of pipeline p in that order. */
int keeps_form(const struct search *search, const struct draft *draft);
void put_in_order(const struct search *search, struct draft *draft, int32_t p);

/* A random draft to begin with; 0 if it came to none. */
int draw_start(struct search *search, struct draft *draft);
/* A small change of layers, depths or shares of the batch, or one of the structure; 0 if it came to none. */
int move_little(struct search *search, struct draft *draft);
int move_much(struct search *search, struct draft *draft);
/* The same change of all stages of a type: their width, their place, or without them. */
int move_type(struct search *search, struct draft *draft);
int is_allowed(const struct search *search, const struct draft *draft);

#endif
