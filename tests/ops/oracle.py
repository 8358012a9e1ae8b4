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


def selective_scan(x, dt, A, B, C, D, state, segment_ids):
    """Mamba: ``[B, T, D]``, ..., state ``[B, D, N]`` to outputs and states after every token."""
    x, dt, A, B, C, D, state = (np.asarray(a, np.float64) for a in (x, dt, A, B, C, D, state))
    outputs, states = np.zeros(x.shape), np.zeros((*x.shape[:2], *state.shape[1:]))
    for b in range(x.shape[0]):
        real, starts = documents(segment_ids[b])
        h = state[b]
        for t in range(x.shape[1]):
            if real[t]:
                h = np.zeros_like(h) if starts[t] else h
                h = np.exp(dt[b, t, :, None] * A) * h + np.outer(dt[b, t] * x[b, t], B[b, t])
                outputs[b, t] = h @ C[b, t] + D * x[b, t]
            states[b, t] = h
    return outputs, states


def ssd(x, dt, A, B, C, D, state, segment_ids):
    """Mamba-2, a head at a time: a scan whose channels share their head's step, rate and B, C."""
    batch, length, heads, size = x.shape
    outputs, states = np.zeros(x.shape), np.zeros((batch, length, *state.shape[1:]))
    for h in range(heads):
        group = h // (heads // B.shape[2])
        y, after = selective_scan(
            x[:, :, h],
            np.repeat(dt[:, :, h, None], size, axis=-1),
            np.full((size, B.shape[-1]), A[h]),
            B[:, :, group],
            C[:, :, group],
            np.full(size, D[h]),
            np.swapaxes(state[:, h], -1, -2),
            segment_ids,
        )
        outputs[:, :, h], states[:, :, h] = y, np.swapaxes(after, -1, -2)
    return outputs, states


def mamba3(x, dt, A, B, C, trap, angles, D, mimo_x, state, segment_ids, interleaved):
    """Mamba-3 as its paper writes it: the state, and the last token's keys and inputs.

    States are ``(angle, S, k, x)``, each ``[B, T, ...]``.
    """
    x, dt, A, B, C, trap, angles, D, mimo_x, *state = (
        np.asarray(a, np.float64) for a in (x, dt, A, B, C, trap, angles, D, mimo_x, *state)
    )
    batch, length, heads = x.shape[:3]
    outputs = np.zeros((*B.shape[:4], x.shape[-1]))
    states = [np.zeros((batch, length, *part.shape[1:])) for part in state]
    for b in range(batch):
        real, starts = documents(segment_ids[b])
        for h in range(heads):
            parts = [part[b, h] for part in state]
            for t in range(length):
                if starts[t]:
                    parts = [np.zeros_like(part) for part in parts]
                if real[t]:
                    angle, S, k, v = parts
                    mix, step = 1 / (1 + np.exp(-trap[b, t, h])), dt[b, t, h]
                    fade = np.exp(step * A[b, t, h])
                    angle = angle + step * np.pi * np.tanh(angles[b, t])
                    late = (1 - mix) * step * fade * k.T @ (v * mimo_x[h])
                    k, v = turned(B[b, t, h], angle, interleaved), x[b, t, h]
                    S = fade * S + late + mix * step * k.T @ (v * mimo_x[h])
                    q = turned(C[b, t, h], angle, interleaved)
                    outputs[b, t, h] = q @ S + D[h] * v * mimo_x[h]
                    parts = [angle, S, k, v]
                for all_states, part in zip(states, parts, strict=True):
                    all_states[b, t, h] = part
    return outputs, states


def turned(x, angle, interleaved):
    """Pairs of channels as complex numbers, multiplied by ``e^{i angle}``."""
    half = x.shape[-1] // 2
    first, second = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    pairs = first + 1j * second
    pairs[:, : len(angle)] *= np.exp(1j * angle)
    out = np.empty_like(x)
    if interleaved:
        out[:, 0::2], out[:, 1::2] = pairs.real, pairs.imag
    else:
        out[:, :half], out[:, half:] = pairs.real, pairs.imag
    return out
