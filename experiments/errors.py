"""What a person did wrong, or what their machine lacks: one sentence, shown without a traceback."""


class ExperimentError(Exception):
    pass
