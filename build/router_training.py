"""Trains the classifier's adapter, with JAX on the CPU: low-rank changes of every matrix, the norms, and a head.

The encoder itself stays as it is. What it is trained with was chosen by cross-validation on the training file alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from build.router_adapter import MATRICES, NORMS, POOLED_SCALE, Floats, Weights
from orchestrator.routing.complexity import TIERS

Ints = npt.NDArray[np.int32]
Tree = Any

# Rows are padded to one of these, so that there are few shapes to compile for.
_LENGTHS = (16, 32, 48, 64, 96, 168, 256)
# Added to the scores of padding.
_MASKED = -10000.0


@dataclass(frozen=True)
class Settings:
    """`num_layers` counts the encoder's layers that are kept. `smoothing` is the share of a label that its neighbours
    get: the tier beside the right one is a smaller fault than one further off."""

    num_layers: int = 6
    rank: int = 8
    scale: float = 2.0
    head_size: int = 128
    learning_rate: float = 1e-3
    head_weight_decay: float = 0.01
    num_epochs: int = 6
    batch_size: int = 32
    warm_up: float = 0.1
    last_rate: float = 0.02
    dropout: float = 0.1
    smoothing: float = 0.1
    max_gradient_norm: float = 1.0
    seed: int = 0


class Encoder(NamedTuple):
    """The frozen part. `words` is FP32 [words in use, hidden]; token ids count its rows."""

    words: Floats
    weights: Weights
    num_heads: int
    eps: float


class Batch(NamedTuple):
    """`ids` and `mask` are [batch, length]; a row of weight 0 is padding."""

    ids: Ints
    mask: Floats
    targets: Floats
    weights: Floats


class Trainer:
    """Trains adapters of one encoder. What is compiled for one training serves the next."""

    def __init__(self, encoder: Encoder, settings: Settings) -> None:
        self._encoder = encoder
        self._settings = settings
        self._frozen = _freeze(encoder, settings.num_layers)
        self._optimiser = _optimiser(settings)
        self._step = jax.jit(self._take_step)
        self._run = jax.jit(self._judge)

    def train(
        self, sequences: Sequence[Ints], labels: Sequence[int], report: Callable[[int, float], None]
    ) -> dict[str, Floats]:
        """The adapter's tensors, `settings.scale` inside `lora_b`. `report` gets each epoch's number and mean loss."""
        settings = self._settings
        parameters = _initial(self._encoder, settings)
        state = self._optimiser.init(parameters)
        targets = soften(labels, settings.smoothing)
        num_steps = settings.num_epochs * math.ceil(len(sequences) / settings.batch_size)
        rates = iter(_rates(settings, num_steps))
        randomness = np.random.default_rng(settings.seed)
        key = jax.random.key(settings.seed, impl="rbg")  # the default generator takes longer than the arithmetic
        for epoch in range(settings.num_epochs):
            losses = []
            for rows in _batches(sequences, settings.batch_size, randomness):
                key, used = jax.random.split(key)
                batch = _make_batch(sequences, targets, rows, settings.batch_size)
                parameters, state, loss = self._step(self._frozen, parameters, state, batch, used, next(rates))
                losses.append(float(loss))
            report(epoch + 1, float(np.mean(losses)))
        return _name(parameters, settings)

    def predict(self, tensors: Weights, sequences: Sequence[Ints], batch_size: int = 64) -> Floats:
        """The head's numbers [rows, tiers] before temperature and softmax."""
        parameters = _unname(tensors, self._settings)
        found = np.zeros((len(sequences), len(TIERS)), np.float32)
        for rows in _batches(sequences, batch_size, None):
            batch = _make_batch(sequences, found, rows, batch_size)
            logits = self._run(self._frozen, parameters, batch.ids, batch.mask)
            found[rows] = np.asarray(logits)[: len(rows)]
        return found

    def _take_step(
        self, frozen: Tree, parameters: Tree, state: Tree, batch: Batch, key: Tree, rate: Tree
    ) -> tuple[Tree, Tree, Tree]:
        def loss_of(parameters: Tree) -> Tree:
            logits = _forward(frozen, parameters, batch.ids, batch.mask, self._encoder, self._settings, key)
            each = -(batch.targets * jax.nn.log_softmax(logits)).sum(-1)
            return (each * batch.weights).sum() / batch.weights.sum()

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, state = self._optimiser.update(gradients, state, parameters)
        return jax.tree.map(lambda value, update: value - rate * update, parameters, updates), state, loss

    def _judge(self, frozen: Tree, parameters: Tree, ids: Tree, mask: Tree) -> Tree:
        return _forward(frozen, parameters, ids, mask, self._encoder, self._settings, None)


def soften(labels: Sequence[int], smoothing: float) -> Floats:
    """[rows, tiers]: a label, `smoothing` of it spread over the tiers beside it."""
    targets = np.zeros((len(labels), len(TIERS)), np.float32)
    for row, label in enumerate(labels):
        neighbours = [tier for tier in (label - 1, label + 1) if 0 <= tier < len(TIERS)]
        targets[row, label] = 1 - smoothing
        targets[row, neighbours] = smoothing / len(neighbours)
    return targets


# --- batches -----------------------------------------------------------------------------------------------


def _batches(
    sequences: Sequence[Ints], size: int, randomness: np.random.Generator | None
) -> Iterator[npt.NDArray[np.int64]]:
    """Rows of like lengths together, else in random order."""
    order = np.arange(len(sequences)) if randomness is None else randomness.permutation(len(sequences))
    lengths = np.array([_padded(len(sequences[row])) for row in order])
    order = order[np.argsort(lengths, kind="stable")]
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    for index in range(len(batches)) if randomness is None else randomness.permutation(len(batches)):
        yield batches[index]


def _padded(length: int) -> int:
    return next(each for each in _LENGTHS if length <= each)


def _make_batch(sequences: Sequence[Ints], targets: Floats, rows: npt.NDArray[np.int64], size: int) -> Batch:
    length = _padded(max(len(sequences[row]) for row in rows))
    ids = np.zeros((size, length), np.int32)
    mask = np.zeros((size, length), np.float32)
    mask[:, 0] = 1  # no row is empty, of padding neither
    for place, row in enumerate(rows):
        ids[place, : len(sequences[row])] = sequences[row]
        mask[place, : len(sequences[row])] = 1
    wanted = np.zeros((size, len(TIERS)), np.float32)
    wanted[: len(rows)] = targets[rows]
    return Batch(ids, mask, wanted, (np.arange(size) < len(rows)).astype(np.float32))


# --- the model ---------------------------------------------------------------------------------------------

# Trees of arrays with the layers stacked in front, so that one layer is compiled and not all of them.


def _freeze(encoder: Encoder, num_layers: int) -> Tree:
    weights = encoder.weights
    positions = weights["embeddings.position_embeddings.weight"]
    return {
        "words": jnp.asarray(encoder.words),
        "positions": jnp.asarray(positions + weights["embeddings.token_type_embeddings.weight"][0]),
        "norm": (weights["embeddings.LayerNorm.weight"], weights["embeddings.LayerNorm.bias"]),
        "layers": {
            name: (_stack(weights, f"{name}.weight", num_layers), _stack(weights, f"{name}.bias", num_layers))
            for name in MATRICES
        },
    }


def _stack(weights: Weights, name: str, num_layers: int) -> Tree:
    return jnp.stack([weights[f"encoder.layer.{index}.{name}"] for index in range(num_layers)])


def _initial(encoder: Encoder, settings: Settings) -> Tree:
    randomness = np.random.default_rng(settings.seed)
    weights, count = encoder.weights, settings.num_layers

    def normal(*shape: int, deviation: float) -> Tree:
        return jnp.asarray(randomness.normal(0, deviation, shape), jnp.float32)

    changes = {}
    for name in MATRICES:
        num_outputs, num_inputs = weights[f"encoder.layer.0.{name}.weight"].shape
        lora_a = normal(count, settings.rank, num_inputs, deviation=0.02)
        changes[name] = (lora_a, jnp.zeros((count, num_outputs, settings.rank)))
    hidden = encoder.words.shape[1]
    sizes = ((settings.head_size, hidden), (len(TIERS), settings.head_size))
    return {
        "changes": changes,
        "norms": {
            name: (_stack(weights, f"{name}.weight", count), _stack(weights, f"{name}.bias", count)) for name in NORMS
        },
        "head": [(normal(*size, deviation=size[1] ** -0.5 / 2), jnp.zeros(size[0])) for size in sizes],
    }


def _optimiser(settings: Settings) -> Any:
    """AdamW but for the learning rate, by which whoever steps multiplies."""

    def decays(parameters: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == "head", parameters)

    return optax.chain(
        optax.clip_by_global_norm(settings.max_gradient_norm),
        optax.scale_by_adam(),
        optax.add_decayed_weights(settings.head_weight_decay, decays),
    )


def _rates(settings: Settings, num_steps: int) -> Floats:
    """The learning rate of each step: up during the warm-up, then down in a line."""
    steps = np.arange(num_steps)
    rising = np.minimum(1.0, (steps + 1) / (settings.warm_up * num_steps))
    falling = np.maximum(settings.last_rate, 1 - steps / num_steps)
    rates: Floats = (settings.learning_rate * rising * falling).astype(np.float32)
    return rates


def _forward(
    frozen: Tree, parameters: Tree, ids: Tree, mask: Tree, encoder: Encoder, settings: Settings, key: Tree
) -> Tree:
    """[batch, length] -> [batch, tiers]. No dropout without a key."""
    batch, length = ids.shape
    hidden_size = encoder.words.shape[1]
    head_size = hidden_size // encoder.num_heads
    bias = (1 - mask)[:, None, None, :] * _MASKED

    def norm(x: Tree, weight: Tree, bias: Tree) -> Tree:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + encoder.eps) * weight + bias

    def drop(x: Tree, key: Tree) -> Tree:
        if key is None:
            return x
        return jnp.where(jax.random.bernoulli(key, 1 - settings.dropout, x.shape), x / (1 - settings.dropout), 0)

    def layer(x: Tree, given: Tree) -> tuple[Tree, None]:
        matrices, changes, norms, keys = given

        def dense(name: str, x: Tree) -> Tree:
            weight, bias = matrices[name]
            lora_a, lora_b = changes[name]
            return x @ (weight + lora_b @ lora_a * settings.scale).T + bias

        def heads(name: str) -> Tree:
            return dense(f"attention.self.{name}", x).reshape(batch, length, -1, head_size)

        scores = jnp.einsum("bqnd,bknd->bnqk", heads("query") * head_size**-0.5, heads("key"))
        mixed = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores + bias, -1), heads("value"))
        attended = dense("attention.output.dense", mixed.reshape(batch, length, hidden_size))
        x = norm(x + drop(attended, keys and keys[0]), *norms["attention.output.LayerNorm"])
        inner = jax.nn.gelu(dense("intermediate.dense", x), approximate=False)
        return norm(x + drop(dense("output.dense", inner), keys and keys[1]), *norms["output.LayerNorm"]), None

    key_of_head, of_layers = (None, None), None
    if key is not None:
        first, second, rest = jax.random.split(key, 3)
        pairs = jax.random.split(rest, 2 * settings.num_layers)
        key_of_head, of_layers = (first, second), (pairs[::2], pairs[1::2])
    x = norm(frozen["words"][ids] + frozen["positions"][:length], *frozen["norm"])
    x, _ = jax.lax.scan(layer, x, (frozen["layers"], parameters["changes"], parameters["norms"], of_layers))
    pooled = POOLED_SCALE * (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    (weight_0, bias_0), (weight_1, bias_1) = parameters["head"]
    inner = jax.nn.gelu(drop(pooled, key_of_head[0]) @ weight_0.T + bias_0, approximate=False)
    return drop(inner, key_of_head[1]) @ weight_1.T + bias_1


def _name(parameters: Tree, settings: Settings) -> dict[str, Floats]:
    """The trees as the adapter's tensors."""
    tensors: dict[str, Floats] = {}
    for index in range(settings.num_layers):
        layer = f"encoder.layer.{index}."
        for name, (lora_a, lora_b) in parameters["changes"].items():
            tensors[f"{layer}{name}.lora_a"] = np.asarray(lora_a[index])
            tensors[f"{layer}{name}.lora_b"] = np.asarray(lora_b[index]) * settings.scale
        for name, (weight, bias) in parameters["norms"].items():
            tensors[f"{layer}{name}.weight"] = np.asarray(weight[index])
            tensors[f"{layer}{name}.bias"] = np.asarray(bias[index])
    for index, (weight, bias) in enumerate(parameters["head"]):
        tensors[f"head.{index}.weight"], tensors[f"head.{index}.bias"] = np.asarray(weight), np.asarray(bias)
    return tensors


def _unname(tensors: Weights, settings: Settings) -> Tree:
    def stack(name: str, factor: float = 1.0) -> Tree:
        return _stack(tensors, name, settings.num_layers) * factor

    return {
        "changes": {name: (stack(f"{name}.lora_a"), stack(f"{name}.lora_b", 1 / settings.scale)) for name in MATRICES},
        "norms": {name: (stack(f"{name}.weight"), stack(f"{name}.bias")) for name in NORMS},
        "head": [(tensors[f"head.{index}.weight"], tensors[f"head.{index}.bias"]) for index in range(2)],
    }
