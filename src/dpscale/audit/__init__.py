"""Empirical lower bounds on ε, from the product's own step."""

from dpscale.audit.canaries import audit as audit
from dpscale.audit.report import AuditReport as AuditReport
from dpscale.card import FALSE_ALARM as FALSE_ALARM
