"""How faithful a surrogate is: error curves, heads, the certificate, null models, complexity."""

from raptor.certificate.certificate import Certificate
from raptor.certificate.error_curves import Curves, ErrorCurves
from raptor.certificate.heads import Head, resolve_head
from raptor.certificate.measure import certify

__all__ = ["Certificate", "Curves", "ErrorCurves", "Head", "certify", "resolve_head"]
