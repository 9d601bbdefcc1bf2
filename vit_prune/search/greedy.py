"""From what each setting loses alone to the state that loses least at a cost.

Losses are taken to add up over blocks and knobs. Where they do not, weights of the knobs and exchanges, both tried on the bench, make up for it.
"""

from collections.abc import Iterator, Mapping, Sequence

from vit_prune.search.cost import MacsCost
from vit_prune.search.levels import Setting, State, uniform

Curves = Mapping[tuple[str, int], Sequence[tuple[float, float]]]  # (knob, block): (value, loss), from nothing to strong
LEAST_LOSS = 1e-9
BISECTIONS = 12
ADVICE = "ask for a larger share, or search another method with it (docs/search.md says how far each one goes)"


class CannotReach(ValueError):
    """No setting of the knobs brings the cost down to the target."""


def evenly(cost: MacsCost, levels: Mapping[str, Sequence[float]], target: float, weights: Mapping[str, float], depth: int) -> State:
    """The weakest state with all blocks alike whose cost is at the target; each knob is turned weight times as far. Raises: CannotReach."""
    weak, strong = 0.0, 1.0 / min(weights.values())
    if cost.share(uniform(levels, {knob: strong * weight for knob, weight in weights.items()}, depth)) > target:
        raise CannotReach(f"{', '.join(weights)}, alike in all blocks, do not come down to {target:g} of the unpruned cost; {ADVICE}")
    for _ in range(BISECTIONS):
        middle = (weak + strong) / 2
        over = cost.share(uniform(levels, {knob: middle * weight for knob, weight in weights.items()}, depth)) > target
        weak, strong = (middle, strong) if over else (weak, middle)
    return uniform(levels, {knob: strong * weight for knob, weight in weights.items()}, depth)


def descend(cost: MacsCost, curves: Curves, target: float, weights: Mapping[str, float]) -> State:
    """Take the move that saves most for what it loses, until the cost is at the target.

    weights: a knob's losses count so many times; a knob that is left out is not turned. Raises: CannotReach.
    """
    state: State = (Setting(),) * (1 + max(block for _, block in curves))
    places = dict.fromkeys((key for key in curves if key[0] in weights), 0)
    for knob, block in places:
        state = changed(state, block, knob, curves[knob, block][0][0])
    share = cost.share(state)
    while share > target:
        moves = list(steps(cost, curves, places, state, share, weights))
        if not moves:
            raise CannotReach(f"{', '.join(weights)} at full strength come to {share:.3f} of the unpruned cost, not to {target:g}; {ADVICE}")
        _, key, place, state = max(moves, key=lambda move: move[0])
        places[key], share = place, cost.share(state)
    return relaxed(cost, curves, places, state, target, weights)


def relaxed(cost: MacsCost, curves: Curves, places: dict[tuple[str, int], int], state: State, target: float, weights: Mapping[str, float]) -> State:
    """Give back what the last move saved beyond the target: the knob that wins most by it goes back as far as it may, until none may."""
    while True:
        best = (0.0, state, None, 0)
        for (knob, block), now in places.items():
            curve = curves[knob, block]
            for place in range(now):
                other = changed(state, block, knob, curve[place][0])
                won = weights[knob] * (curve[now][1] - curve[place][1])
                if won > best[0] and cost.share(other) <= target:
                    best = (won, other, (knob, block), place)
        if best[2] is None:
            return state
        state, places[best[2]] = best[1], best[3]


def steps(
    cost: MacsCost, curves: Curves, places: Mapping[tuple[str, int], int], state: State, share: float, weights: Mapping[str, float]
) -> Iterator[tuple[float, tuple[str, int], int, State]]:
    """(cost saved per loss, what is turned, to which place of its curve, the state then), for every move that saves."""
    for (knob, block), now in places.items():
        curve = curves[knob, block]
        for place in ahead(now, len(curve)):
            after = changed(state, block, knob, curve[place][0])
            saved = share - cost.share(after)
            if saved > 0:
                lost = weights[knob] * max(curve[place][1] - curve[now][1], LEAST_LOSS)
                yield saved / lost, (knob, block), place, after


def ahead(now: int, count: int) -> Iterator[int]:
    """The next places of a curve of so many: 1, 2, 4, 8, ... away, and the last."""
    distance = 1
    while now + distance < count - 1:
        yield now + distance
        distance *= 2
    if now < count - 1:
        yield count - 1


def changed(state: State, block: int, knob: str, value: float) -> State:
    """The state with one knob of one block set otherwise."""
    return (*state[:block], state[block]._replace(**{knob: value}), *state[block + 1 :])
