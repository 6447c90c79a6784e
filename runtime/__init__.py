"""Pack to mlx-lm model: slots, policy, reads, memory plan.

`load` gives the pair that `mlx_lm.load` gives, so everything built on mlx-lm works on a pack.
"""

from moepack.runtime.loading import load, load_model

__all__ = ["load", "load_model"]
