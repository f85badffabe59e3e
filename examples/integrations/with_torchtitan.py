"""Two sites train one model, each in a trainer of torchtitan's own, with as many ranks as it likes:

LOCO_SITES=2 LOCO_AT=10.0.0.1:29510 LOCO_SITE=berlin torchrun --nproc-per-node 8 with_torchtitan.py
LOCO_SITES=2 LOCO_AT=10.0.0.1:29510 LOCO_SITE=paris  torchrun --nproc-per-node 8 with_torchtitan.py
"""

from torchtitan.models.llama3 import config_registry

from loco.integrations.torchtitan import LocoMetricsProcessor, LocoOptimizersContainer, LocoValidator


def main() -> None:
    config = config_registry.llama3_debugmodel()  # or any other
    config.optimizer = LocoOptimizersContainer.of(config.optimizer, sync_every=8)
    config.validator = LocoValidator.of(config.validator)  # on θ, where the config enables it
    config.metrics = LocoMetricsProcessor.of(config.metrics)  # loco/… beside its own
    trainer = config.build()
    trainer.train()
    rounds = trainer.optimizers.handle
    if rounds.local_step:
        rounds.sync()  # so that both sites end with one model
    print(rounds.last_report)
    trainer.close()


if __name__ == "__main__":
    main()
