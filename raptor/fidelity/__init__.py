"""How faithful a surrogate is: error curves, heads, the certificate, null models, complexity."""

from raptor.fidelity.certificate import Certificate, certify
from raptor.fidelity.error_curves import Curves, ErrorCurves
from raptor.fidelity.heads import Head, resolve_head

__all__ = ["Certificate", "Curves", "ErrorCurves", "Head", "certify", "resolve_head"]
