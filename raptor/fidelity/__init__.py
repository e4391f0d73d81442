"""How faithful a surrogate is: error curves, heads, the certificate, null models, complexity."""

from raptor.fidelity.certificate import Certificate
from raptor.fidelity.error_curves import Curves, ErrorCurves
from raptor.fidelity.heads import Head, resolve_head
from raptor.fidelity.measure import certify

__all__ = ["Certificate", "Curves", "ErrorCurves", "Head", "certify", "resolve_head"]
