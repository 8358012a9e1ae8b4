"""Float64 loops over time, written from the formulas and from nothing in the package."""

import numpy as np


def documents(segment_ids):
    """Per token ``[T]``: is it real, and does it start a document that is not the first."""
    real, starts, last = [], [], None
    for number in segment_ids:
        real.append(number != 0)
        starts.append(number != 0 and last is not None and number != last)
        last = number if number != 0 else last
    return real, starts


def gated_delta_rule(q, k, v, g, beta, state, scale, segment_ids):
    """``[B, T, Hq, K]``, ..., ids ``[B, T]`` to outputs ``[B, T, H, V]``, states after every token.

    Per token: forget, compare with what is remembered, correct, read.
    """
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    batch, length, heads = v.shape[:3]
    group = heads // q.shape[2]
    outputs = np.zeros(v.shape)
    states = np.zeros((batch, length, *state.shape[1:]))
    for b in range(batch):
        real, starts = documents(segment_ids[b])
        for h in range(heads):
            memory = state[b, h].copy()
            for t in range(length):
                if starts[t]:
                    memory = np.zeros_like(memory)
                if real[t]:
                    key, query = k[b, t, h // group], q[b, t, h // group]
                    memory = memory * np.exp(g[b, t, h]) if np.isfinite(g[b, t, h]) else 0 * memory
                    error = v[b, t, h] - memory.T @ key
                    memory = memory + beta[b, t, h] * np.outer(key, error)
                    outputs[b, t, h] = scale * memory.T @ query
                states[b, t, h] = memory
    return outputs, states


def attention(q, k, v, scale, window, segment_ids):
    """Scores of one query at a time, over the real tokens of its document up to itself."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    outputs = np.zeros((*q.shape[:3], v.shape[3]))
    for b in range(q.shape[0]):
        real, starts = documents(segment_ids[b])
        seen = []
        for t in range(q.shape[1]):
            if not real[t]:
                continue
            seen = [t] if starts[t] else [*seen, t]
            within = seen[-window:] if window else seen
            for h in range(q.shape[2]):
                scores = scale * k[b, within, h // group] @ q[b, t, h]
                weights = np.exp(scores - scores.max())
                outputs[b, t, h] = weights @ v[b, within, h // group] / weights.sum()
    return outputs


def causal_conv1d(x, kernel, bias, window, segment_ids):
    """One token at a time over a list of the document's inputs so far, plus the window after."""
    x, kernel, bias = (np.asarray(a, np.float64) for a in (x, kernel, bias))
    width, y, after = kernel.shape[0], np.zeros(x.shape), np.array(window, np.float64)
    zeros = [np.zeros(x.shape[2])] * width
    for b in range(x.shape[0]):
        real, starts = documents(segment_ids[b])
        inputs = zeros + list(after[b])
        for t in range(x.shape[1]):
            if not real[t]:
                continue
            inputs = (zeros if starts[t] else inputs) + [x[b, t]]
            y[b, t] = sum(kernel[i] * inputs[i - width] for i in range(width)) + bias
        if width > 1:
            after[b] = inputs[1 - width :]
    return y, after
