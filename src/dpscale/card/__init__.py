"""The privacy card of a run: made, shown as a page, and verified by other code."""

from dpscale.card.card import Booked as Booked
from dpscale.card.card import Card as Card
from dpscale.card.card import history as history
from dpscale.card.card import make as make
from dpscale.card.card import randomness as randomness
from dpscale.card.card import verify as verify
from dpscale.card.recompute import FALSE_ALARM as FALSE_ALARM
from dpscale.card.recompute import SCHEMA as SCHEMA
from dpscale.card.recompute import checksum as checksum
