"""Nobody waits long for another: bounds in tokens of others' prompts, over any arrivals."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from locret_kit.runtime.sequence import LONG, PATIENCE, PromptScheduler


@dataclass(eq=False)
class Prompt:
    """A prompt in a simulation. ``others``: tokens of others' prompts since it entered; of a book, since its last piece."""

    tokens: int
    chunk: int
    background: bool = False
    read: int = 0
    others: int = 0
    gaps: list[int] = field(default_factory=list)

    @property
    def book(self) -> bool:
        return self.background or self.tokens > LONG * self.chunk

    @property
    def remaining(self) -> int:
        return self.tokens - self.read

    @property
    def piece_len(self) -> int:
        return min(self.chunk, self.remaining)


def simulate(scheduler: PromptScheduler, arrivals: list[tuple[int, Prompt]]) -> tuple[list[Prompt], list[int]]:
    """Forwards until all is read: the prompts in the order in which they ended, and the tokens of each forward."""
    queue, inside, done, forwards = [], [], [], []
    arrivals = sorted(arrivals, key=lambda one: one[0])
    for now in range(100_000):
        while arrivals and arrivals[0][0] <= now:
            queue.append(arrivals.pop(0)[1])
        for prompt in list(queue):
            if scheduler.takes(prompt.remaining, background=prompt.background):
                scheduler.enter(prompt, prompt.remaining, background=prompt.background)
                queue.remove(prompt)
                inside.append(prompt)
        chosen = scheduler.pick(inside)
        assert chosen or not inside
        work = {id(prompt): prompt.piece_len for prompt in chosen}
        forwards.append(sum(work.values()))
        for prompt in inside:
            prompt.others += forwards[-1] - work.get(id(prompt), 0)
        for prompt in chosen:
            prompt.gaps.append(prompt.others)
            prompt.read += work[id(prompt)]
            if prompt.book:
                prompt.others = 0
        done += [prompt for prompt in inside if not prompt.remaining]
        inside = [prompt for prompt in inside if prompt.remaining]
        if not (inside or queue or arrivals):
            return done, forwards
    raise AssertionError("somebody waits forever")


prompts = st.builds(
    lambda chunks, rest, background, chunk: (chunks * chunk + rest % chunk + 1, background),
    st.sampled_from([0, 0, 0, 1, 1, 2, 5, 15, 16, 40]), st.integers(0, 10_000), st.booleans(), st.just(64),
)  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 60), prompts), min_size=1, max_size=25), st.sampled_from([64, 100, 512]))
def test_between_entry_and_first_token_three_chunks_of_others_are_read_at_most(arriving, piece):
    chunk = 64
    scheduler = PromptScheduler(chunk, piece)
    made = [(at, Prompt(tokens, chunk, background and tokens > 3 * chunk)) for at, (tokens, background) in arriving]
    done, forwards = simulate(scheduler, made)
    assert len(done) == len(made)
    for prompt in done:
        if not prompt.book:
            assert prompt.others <= PATIENCE * chunk
        else:  # between two of its pieces others have theirs: those in front, of which one may be long, and other books
            assert max(prompt.gaps) <= (2 * PATIENCE + LONG + sum(one.book for one in done)) * chunk
    # Every forward gives each answer a token, so this is what comes between two of its tokens.
    assert max(forwards) <= PATIENCE * chunk


def test_short_prompts_come_before_long_ones_and_books_are_not_forgotten():
    scheduler, chunk = PromptScheduler(64, 64), 64
    book, long = Prompt(64 * 100, chunk, background=True), Prompt(64 * 10, chunk)
    short = [Prompt(20, chunk) for _ in range(200)]
    done, _ = simulate(scheduler, [(0, book), (2, long), *((3 + at // 2, one) for at, one in enumerate(short))])
    assert done.index(short[0]) < done.index(long) < done.index(book)
    assert done.index(long) < 20  # three chunks of the short ones, then their turn is over


def test_many_short_prompts_share_a_forward():
    _, forwards = simulate(PromptScheduler(64, 64), [(0, Prompt(16, 64)) for _ in range(32)])
    assert len(forwards) == 8
