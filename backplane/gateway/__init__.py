"""One address for the model requests of any client: four interfaces in front, any configured service behind."""

from backplane.gateway.fronts import FRONTS
from backplane.gateway.serving import Gateway, open_gateway

__all__ = ["FRONTS", "Gateway", "open_gateway"]
