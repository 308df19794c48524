"""How long a worker's step takes, fitted to the results of its steps. It reads no clock: results bring their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# The sums forget: a step's weight falls to 1/e after this many steps of its kind. At 10 ms a step that is 1.3 s, so the
# fit follows a machine that gets slower, and a hundred steps average a jitter of 10 % down to 1 %.
MEMORY_STEPS = 128
# Weight of the previous model in a new fit, for each coefficient: as much as this many steps. The previous model
# decides the coefficients that the latest steps do not determine.
PRIOR_STEPS = 4.0
# The same for a model that is not measured: any step outweighs it.
GUESS_STEPS = 0.01
# After this many steps the fit can tell a stall from a normal step.
TRUSTED_STEPS = 16
# A step that takes more than this many times its prediction counts as exactly this many times.
MOST_TIMES_PREDICTED = 4.0
# A worker has another speed if OTHER_SPEED_STEPS steps in a row are off by this factor, in the same direction.
OTHER_SPEED = 2.0
OTHER_SPEED_STEPS = 8
# The model is solved after 1, 2, 4, 8, 16 and 32 steps, later after every 32. Solving takes 20 us: below 1 us a step.
SOLVE_EVERY_STEPS = 32
LEAST_S = 1e-6
# If the steps cannot tell two costs apart, the costs keep the proportions of the previous model (say, base 90 %, rows
# 2 %). A cost below this part of a step counts as this part; otherwise its coefficient could never grow.
LEAST_PART = 0.02


class StepTime(NamedTuple):
    """base_s + token_s * new_tokens + context_s * context_tokens + row_s * rows seconds. No coefficient is negative."""

    base_s: float
    token_s: float  # for each prompt token that the step computes
    context_s: float  # for each token that its decoding rows attend to
    row_s: float  # for each sequence in it

    def of(self, new_tokens: float, context_tokens: float, rows: float) -> float:
        """Predicted seconds of a step with these prompt tokens, attended tokens of decoding rows, and rows."""
        return self.base_s + self.token_s * new_tokens + self.context_s * context_tokens + self.row_s * rows


# The model before any worker has returned a result. Only the ratios count, and only for the first few steps. They are
# those of a model of 8B parameters on one H200.
UNKNOWN = StepTime(base_s=5e-3, token_s=2e-5, context_s=3e-8, row_s=1e-5)


class StepTimeFit:
    """Ridge regression with forgetting, in relative errors, non-negative. One per worker.

    Steps with prompt tokens and steps without are summed separately, and each sum forgets only when a step of its kind
    comes: a worker that decodes for an hour still knows what a prompt token costs. The ridge pulls to the previous
    model, and at first to the model of the fleet. Where the steps determine nothing (the rows never change, so base and
    row cannot be told apart), the previous values stay.
    """

    def __init__(self, prior: StepTime = UNKNOWN) -> None:
        self._num_steps = 0
        self.start_from(prior)
        self._next_solve = 1
        self._side, self._num_ratios, self._ratios = 0, 0, 0.0  # of the last steps in a row at another speed
        self._decodes = _Sums()
        self._prefills = _Sums()

    @property
    def is_new(self) -> bool:
        """No step has been added."""
        return not self._num_steps

    @property
    def is_measured(self) -> bool:
        """Whether another worker can start from it."""
        return self._num_steps >= TRUSTED_STEPS

    def start_from(self, prior: StepTime) -> None:
        """Set the model that holds until the first solution."""
        self.time = prior
        self._prior_steps = GUESS_STEPS if prior is UNKNOWN else PRIOR_STEPS

    def add(self, new_tokens: int, context_tokens: int, rows: int, seconds: float) -> None:
        """Add a step's duration. Takes 3 us, solving included."""
        seconds = max(seconds, LEAST_S)
        scale = seconds
        if self._num_steps >= TRUSTED_STEPS or self._prior_steps == PRIOR_STEPS:
            scale = max(self.time.of(new_tokens, context_tokens, rows), LEAST_S)
            self._watch_speed(seconds / scale)
            seconds = min(seconds, MOST_TIMES_PREDICTED * scale)
        sums = self._prefills if new_tokens else self._decodes
        sums.add(1.0 / scale, new_tokens / scale, context_tokens / scale, rows / scale, seconds / scale)
        self._num_steps += 1
        if self._num_steps >= self._next_solve:
            self._next_solve = self._num_steps + min(self._num_steps, SOLVE_EVERY_STEPS)
            self._solve()

    def _watch_speed(self, ratio: float) -> None:
        """If OTHER_SPEED_STEPS steps in a row take more than twice or less than half of the prediction, the machine has
        another speed: this is no stall. The model is scaled, and the sums are dropped."""
        side = (ratio > OTHER_SPEED) - (ratio < 1 / OTHER_SPEED)
        if not side or side != self._side:
            self._side, self._num_ratios, self._ratios = side, 0, 0.0
        if not side:
            return
        self._num_ratios += 1
        self._ratios += ratio
        if self._num_ratios == OTHER_SPEED_STEPS:
            mean = self._ratios / self._num_ratios
            self.time = StepTime(*(value * mean for value in self.time))
            self._decodes, self._prefills = _Sums(), _Sums()
            self._side = 0

    def _solve(self) -> None:
        """Non-negative least squares with a ridge: solve; set the most negative coefficient to 0; again."""
        one, other = self._decodes, self._prefills
        products, targets = _merged(one, other)
        num_steps = one.num_steps / one.weight + other.num_steps / other.weight
        means = [products[i][i] / num_steps for i in range(4)]  # of squared features
        means[1] *= num_steps / max(other.num_steps / other.weight, 1e-9)
        parts = [seconds * mean**0.5 for seconds, mean in zip(self.time, means, strict=True)]
        whole = max(sum(parts), 1e-9)
        for i in range(4):
            ridge = self._prior_steps * means[i] / max(parts[i] / whole, LEAST_PART) if means[i] else 1.0
            products[i][i] += ridge
            targets[i] += ridge * self.time[i]
        free = [0, 1, 2, 3]
        while True:
            solved = _solved(products, targets, free)
            i = min(free, key=lambda i: solved[i] * products[i][i] ** 0.5)
            if solved[i] >= 0:
                break
            free.remove(i)
        self.time = StepTime(*solved)
        self._prior_steps = PRIOR_STEPS if self.is_measured else self._prior_steps


class _Sums:
    """Sums over steps: products of the four features, and of the features with the target. The latest step has weight
    `weight`, which grows by a factor each step. That is cheaper than shrinking all sums."""

    __slots__ = ("num_steps", "products", "targets", "weight")

    GROWTH = 1.0 + 1.0 / MEMORY_STEPS
    MOST = 1e100

    def __init__(self) -> None:
        self.weight = 1.0
        self.num_steps = 0.0
        self.products = [0.0] * 10  # the upper triangle by rows
        self.targets = [0.0] * 4

    def add(self, one: float, new: float, context: float, rows: float, target: float) -> None:
        self.weight = weight = self.weight * self.GROWTH
        self.num_steps += weight
        products, targets = self.products, self.targets
        first, third, fourth = weight * one, weight * context, weight * rows
        products[0] += first * one
        products[2] += first * context
        products[3] += first * rows
        products[7] += third * context
        products[8] += third * rows
        products[9] += fourth * rows
        targets[0] += first * target
        targets[2] += third * target
        targets[3] += fourth * target
        if new:
            second = weight * new
            products[1] += second * one
            products[4] += second * new
            products[5] += second * context
            products[6] += second * rows
            targets[1] += second * target
        if weight > self.MOST:
            self.products = [value / weight for value in products]
            self.targets = [value / weight for value in targets]
            self.num_steps /= weight
            self.weight = 1.0


def _merged(one: _Sums, other: _Sums) -> tuple[list[list[float]], list[float]]:
    """The 4 x 4 matrix of products, and the targets, of both sums. The latest step of each has weight 1."""
    p = [x / one.weight + y / other.weight for x, y in zip(one.products, other.products, strict=True)]
    matrix = [[p[0], p[1], p[2], p[3]], [p[1], p[4], p[5], p[6]], [p[2], p[5], p[7], p[8]], [p[3], p[6], p[8], p[9]]]
    return matrix, [x / one.weight + y / other.weight for x, y in zip(one.targets, other.targets, strict=True)]


def _solved(matrix: list[list[float]], targets: list[float], free: list[int]) -> list[float]:
    """Solve for the free coefficients; the others are 0. Gaussian elimination. The matrix is symmetric and positive
    definite, so no pivoting is needed, whatever the scales of the coefficients."""
    rows = [[*(matrix[i][j] for j in free), targets[i]] for i in free]
    size = len(free)
    for k in range(size):
        pivot = rows[k]
        for i in range(k + 1, size):
            factor = rows[i][k] / pivot[k]
            if factor:
                row = rows[i]
                for j in range(k, size + 1):
                    row[j] -= factor * pivot[j]
    solved = [0.0] * 4
    for k in range(size - 1, -1, -1):
        row = rows[k]
        rest = sum(row[j] * solved[free[j]] for j in range(k + 1, size))
        solved[free[k]] = (row[size] - rest) / row[k]
    return solved


class FleetStepTimes:
    """The model for a new worker: the mean of the measured workers, or that of the last worker that left."""

    def __init__(self) -> None:
        self._last = UNKNOWN

    def left(self, fit: StepTimeFit) -> None:
        if fit.is_measured:
            self._last = fit.time

    def begin(self, fits: Sequence[StepTimeFit]) -> None:
        """Give fits without a step the model of the other workers."""
        if not any(fit.is_new for fit in fits):
            return
        measured = [fit.time for fit in fits if fit.is_measured]
        prior = self._last
        if measured:
            prior = StepTime(*(sum(values) / len(measured) for values in zip(*measured, strict=True)))
        for fit in fits:
            if fit.is_new:
                fit.start_from(prior)


class OutputLength:
    """The mean number of tokens that requests generate. About the latest 128 requests contribute most."""

    MEMORY_REQUESTS = 128

    def __init__(self) -> None:
        self.mean_tokens: float | None = None  # None until a request has ended
        self._num_requests = 0

    def add(self, num_tokens: int) -> None:
        """A request has ended by itself, with this many output tokens."""
        self._num_requests = min(self._num_requests + 1, self.MEMORY_REQUESTS)
        mean = self.mean_tokens or 0.0
        self.mean_tokens = mean + (num_tokens - mean) / self._num_requests
