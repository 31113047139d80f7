"""What the examples with transformers' Trainer do on a machine with several GPUs."""

from transformers import TrainingArguments


def use_one_gpu(arguments: TrainingArguments) -> None:
    """Keep Trainer from wrapping the model in nn.DataParallel where there are several GPUs.

    It does so in a process that torchrun did not start, and runs the model in threads that no
    compiled graph holds. `torchrun --nproc-per-node=...` uses all GPUs, and fuses.
    """
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
