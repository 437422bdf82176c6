"""Generation: prompts solved in one window, then token by token, each row as it would be alone."""

from implicit_blocks.decoding.generated import CallStatistics, Generated, Step
from implicit_blocks.decoding.generation import Stream, generate, stream
from implicit_blocks.decoding.sampling import Sampling
from implicit_blocks.decoding.scoring import Scored, score
from implicit_blocks.decoding.slots.continuous import ContinuousDecoder
from implicit_blocks.decoding.slots.texts import NewToken, Request

__all__ = [
    "CallStatistics",
    "ContinuousDecoder",
    "Generated",
    "NewToken",
    "Request",
    "Sampling",
    "Scored",
    "Step",
    "Stream",
    "generate",
    "score",
    "stream",
]
