"""What every backend must pass, also one written elsewhere: ``check_backend`` and, for pytest, ``contract_cases``."""

from .contract import Case, Outcome, check_backend, contract_cases
from .examples import Example

__all__ = ["Case", "Example", "Outcome", "check_backend", "contract_cases"]
