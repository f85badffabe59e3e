"""What a person did wrong, or what their machine lacks: one sentence, shown without a traceback."""


class ExperimentError(Exception):
    pass


def missing_extra(error: ImportError, extra: str = "experiments") -> SystemExit:
    """To be raised where an optional package can't be imported, so that a command ends in one sentence."""
    package = (error.name or str(error)).partition(".")[0]
    install = f"pip install 'pulseloco[{extra}]' (in a checkout: pip install '.[{extra}]')"
    return SystemExit(f"error: {package} is not installed: {install}")
