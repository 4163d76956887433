"""How large a network is, in the three units a budget can be given in."""

from dataclasses import dataclass

__all__ = ["Size"]


@dataclass(frozen=True)
class Size:
    """Parameters, output channels of layers, and floating-point operations for one sample.

    >>> import prospr
    >>> print(prospr.channels.Size(parameters=1000, channels=20, flops=5000))
    1,000 parameters, 20 channels, 5,000 FLOPs
    """

    parameters: int
    channels: int
    flops: int

    def __str__(self) -> str:
        return f"{self.parameters:,} parameters, {self.channels:,} channels, {self.flops:,} FLOPs"
