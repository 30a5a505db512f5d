/* What the plans and the passes know of each cell: a row of a table. */
#pragma once

typedef struct {
    int products;   /* of a step that read x; each needs the results of the one before */
    int matrices;   /* of weights, each with rows for x and rows for the state */
    int state_matrices;  /* by which a step's d is multiplied for the gradient of the state before it */
    int gates[2];   /* of each matrix: its columns in units of H */
    int separate;   /* 1 if the last gate's products with x and with h are not added */
    int states;     /* that a step hands on: h, or cs and h */
    int biases;
    int peepholes;
    int saved;      /* arrays [T,B,H] on the tape of a layer beside h, in the order of the enum in operands.pxd */
    double forward_time, backward_time;  /* nanoseconds of a line of units of one row in a step, beside the products */
} CellRow;

/* A projected LSTM has one product and one matrix more, a coupled one no first gate. */
/*                      products, matrices, state_matrices, gates, separate, states, biases, peepholes, saved, ns, ns */
static const CellRow LSTM =            {1, 1, 1, {4, 0}, 0, 2, 1, 3, 6, 30, 50};
static const CellRow GRU =             {2, 2, 1, {2, 1}, 0, 1, 2, 0, 3, 20, 45};
static const CellRow GRU_RESET_AFTER = {1, 2, 2, {2, 1}, 1, 1, 3, 0, 4, 20, 45};
static const CellRow RNN =             {1, 1, 1, {1, 0}, 0, 1, 1, 0, 0, 9, 20};
