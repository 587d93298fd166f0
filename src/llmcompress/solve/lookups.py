"""The loss of a matrix that is the head and the embedding as well: the sum of what an error costs in both."""

from llmcompress.solve.damping import inverse_factor
from llmcompress.stats.gram import Gram

_DAMPING = 0.01  # as GPTQ's own


def with_lookups(gram: Gram) -> Gram:
    """The Gram matrix of a head's inputs [in, in], and that of rows which are looked up, weighed alike.

    A token's row goes on into the model as it is, so an error of it costs its square, whatever its direction: the Gram
    matrix of that is the identity. What rounding with error feedback leaves of a loss goes by the geometric mean of
    the eigenvalues of its Gram matrix, so the identity is scaled to the one of the head's. How often a token occurs is
    left out: the head's loss does not know it either, and so all rows share one factor.
    """
    both = gram.mean().clone()
    pivots = inverse_factor(both, _DAMPING).pivots  # of a factor of the inverse
    both.diagonal().add_(pivots.log().mean().mul(-2).exp())
    return Gram.of(both, gram.tokens)
