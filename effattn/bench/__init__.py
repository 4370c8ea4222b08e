"""The experiment runner: study -> cells -> measurements -> records -> figures and report."""
