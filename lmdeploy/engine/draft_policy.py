"""How many drafts are worth their computing, from what came of earlier ones and what steps have cost.

Two things decide. Each sequence has a rate for each kind of lead: how often such a draft was right, so that
one i tokens away is right with the i-th power of it. Each number of rows has measured costs: what a step
takes for so many tokens, relative to one without drafts. The number of drafts is the one with the most
tokens for the time. An account bounds what a wrong guess can cost: drafts are paid from it and it is
refilled by the steps they saved and by a small share of every step, so text in which no draft is right loses
that share and no more. Knows seconds as numbers that are given; has no clock.
"""

from __future__ import annotations

from collections import deque

from lmdeploy.engine.speculation import Lead
from lmdeploy.engine.step_cost import StepCost

_SHARE = 0.02  # of every step, for trying drafts that may be of no use
_FIRST_ACCOUNT = 1.0  # steps; the share fills it up to this again, and then a try is due
_MOST_SAVED = 6.0  # steps: what earlier success may be spent on
_FIRST_RATE = 0.7  # before anything is known
_STEP_OF_RATE = 0.1  # how fast the rate of a sequence follows what comes of its drafts
_STEP_OF_PRIOR = 0.02  # the same for the rate that new sequences begin with
_PLAIN_EVERY = 32  # steps after which one goes without drafts, so that its cost is known
_DEAREST_READING = 1.0  # steps: a draft model that reads a prompt does so once, like the first model
_LEAST_COST = 0.005  # of a draft, relative to a step; a measured nothing would make useless drafts free
_DEAR = StepCost((1, 2), (1.0, 1.1))  # when nothing is known: a tenth of a step for each draft


class StepCosts:
    """Medians of the last seconds measured for each (sequences, tokens) of a step of decode rows.

    `first`: what steps of so many tokens cost before any of these was measured.
    """

    def __init__(self, first: StepCost) -> None:
        self._first = first
        self._seen: dict[tuple[int, int], deque[float]] = {}
        self._medians: dict[int, dict[int, float]] = {}  # sequences -> drafts -> seconds

    @property
    def measured(self) -> bool:
        """Whether anything was."""
        return bool(self._medians)

    def measure(self, num_rows: int, drafts: int, seconds: float) -> None:
        seen = self._seen.setdefault((num_rows, drafts), deque(maxlen=7))
        seen.append(seconds)
        self._medians.setdefault(num_rows, {})[drafts] = sorted(seen)[len(seen) // 2]

    def plain(self, num_rows: int) -> float:
        """Seconds of a step without drafts; 0 while none was measured."""
        return self._medians.get(num_rows, {}).get(0, 0.0)

    def relative(self, num_rows: int, most: int) -> list[float]:
        """Cost of steps with 0, 1, ... `most` drafts, in steps without; between measurements on a line."""
        medians, plain, first = self._medians.get(num_rows, {}), self.plain(num_rows), self._first
        known = {drafts: seconds / plain for drafts, seconds in medians.items()} if plain else {0: 1.0}
        costs, at = [1.0], 0
        for place in sorted(known)[1:]:
            step = max((known[place] - costs[at]) / (place - at), _LEAST_COST)
            costs += [costs[at] + step * i for i in range(1, place - at + 1)]
            at = place
        base = first.step(num_rows)
        offset = costs[at] - first.step(num_rows + at) / base
        costs += [offset + first.step(num_rows + i) / base for i in range(at + 1, most + 1)]
        return costs[: most + 1]


class AdaptivePolicy:
    """Implements `speculation.Policy` for drafts of at most `most` tokens a sequence."""

    def __init__(self, num_kinds: int, most: int, first_cost: StepCost = _DEAR) -> None:
        self._most = most
        self._priors = [_FIRST_RATE] * num_kinds
        self._costs = StepCosts(first_cost)
        self._account = _FIRST_ACCOUNT  # in steps without drafts
        self._steps = 0
        self._rows = 1  # of the step in progress
        self._depth_costs: deque[float] = deque(maxlen=7)
        self._depth_cost = 0.0  # their median: of finding drafts one token further, in steps without

    def ready(self, num_rows: int) -> bool:
        """Not while the account is empty, in one step out of many, or before a plain step was measured."""
        self._steps += 1
        self._rows = num_rows
        if self._account < _FIRST_ACCOUNT:
            self._account += _SHARE
        known = not self._costs.measured or self._costs.plain(num_rows) > 0
        return known and self._account > 0 and self._steps % _PLAIN_EVERY != 0

    def lengths(self, leads: list[Lead], num_rows: int) -> list[int]:
        """Those that give most tokens for the time; if none pays, one for a try when the account allows."""
        chances = [(c, -at, i) for at, lead in enumerate(leads) for i, c in enumerate(self._chances(lead), 1)]
        chances.sort(reverse=True)
        costs = self._costs.relative(num_rows, len(chances))
        best, best_speed, tokens, depth = 0, float(num_rows), float(num_rows), 0
        for count, (chance, _, i) in enumerate(chances, 1):
            tokens += chance
            depth = max(depth, i)
            speed = tokens / (costs[count] + depth * self._depth_cost)
            if speed > best_speed:
                best, best_speed = count, speed
        if not best and self._account >= _FIRST_ACCOUNT:
            best = 1
        self._pay(costs[best] - 1)
        lengths = [0] * len(leads)
        for _, at, _ in chances[:best]:
            lengths[-at] += 1
        return lengths

    def settle(self, lead: Lead, drafted: int, accepted: int) -> None:
        """Drafts up to the first wrong one say something of the rate; those behind it say nothing."""
        rates = self._rates(lead)
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            rates[lead.kind] += _STEP_OF_RATE * (right - rates[lead.kind])
            self._priors[lead.kind] += _STEP_OF_PRIOR * (right - self._priors[lead.kind])
        self._pay(-accepted / self._rows)

    def measure(
        self, num_rows: int, num_drafts: int, deepest: int, drafting: float, computing: float
    ) -> None:
        """Costs of the step that has just run."""
        self._costs.measure(num_rows, num_drafts, computing)
        plain = self._costs.plain(num_rows)
        if plain:
            self._pay(min(drafting / plain, _MOST_SAVED if deepest else _DEAREST_READING))
            if deepest:
                self._depth_costs.append(drafting / plain / deepest)
                self._depth_cost = sorted(self._depth_costs)[len(self._depth_costs) // 2]

    def _pay(self, steps: float) -> None:
        self._account = min(self._account - steps, _MOST_SAVED)

    def _chances(self, lead: Lead) -> list[float]:
        rate, chance, chances = self._rates(lead)[lead.kind], 1.0, []
        for _ in range(self._most):
            chance *= rate
            chances.append(chance)
        return chances

    def _rates(self, lead: Lead) -> list[float]:
        if lead.seq.draft_rates is None:
            lead.seq.draft_rates = self._priors.copy()
        return lead.seq.draft_rates
