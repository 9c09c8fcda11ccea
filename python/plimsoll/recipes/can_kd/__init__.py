# SPDX-License-Identifier: Apache-2.0
"""The recipe `can-kd`: intrusion detection on CAN-bus graphs, by a teacher and a student of it.

Two models, an autoencoder that has only seen normal traffic and a classifier, are trained as a large teacher and as a student of
a few per cent of its size. docs/recipes/can-kd.md says what each option does.
Reading order: _models.py, _losses.py, _tasks.py, _training.py, _teacher.py, _fusion.py, _scores.py, _evaluate.py,
_plan.py, _run.py.

Threads: the thread that trains; torch runs its own.
Memory:  one task's model, teacher and optimizer, a step, and the graphs that are cached.
"""
from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING, Any

from .. import DeviceOptions, Recipe, Told, option

if TYPE_CHECKING:
    from ...run._run import Run


@dataclasses.dataclass(kw_only=True)
class Options(DeviceOptions):
    seed: int = 42
    checkpoint_every_n_steps: int = 200
    teacher_path: str = option("", "Teacher to distil from: a run, a weights file or a folder; empty: this run's own teacher", path=True)
    stage: str = option("all", "Stage of training that this call does; the others may follow by later calls",
                        choices=("all", "autoencoder", "curriculum", "normal", "fusion", "evaluation"), decides_bits=False)
    model_size: str = option("both", "Model that this call trains: the teacher, the student or both",
                             choices=("both", "teacher", "student"), decides_bits=False)
    teacher_vgae_hidden_dims: str = option("1024,512,96", "Widths of the teacher autoencoder's layers, the latent's last", widths=True, least=1, most=65536)
    teacher_vgae_heads: int = option(4, "Attention heads of the teacher autoencoder's first layer", least=1, most=256)
    teacher_vgae_embedding_dim: int = option(64, "Width of the CAN-id embedding in the teacher autoencoder", least=1, most=65536)
    teacher_gat_hidden: int = option(64, "Width of one attention head of the teacher classifier", least=1, most=65536)
    teacher_gat_layers: int = option(5, "Number of attention layers of the teacher classifier", least=1, most=64)
    teacher_gat_heads: int = option(8, "Attention heads of each layer of the teacher classifier", least=1, most=256)
    teacher_gat_embedding_dim: int = option(32, "Width of the CAN-id embedding in the teacher classifier", least=1, most=65536)
    teacher_gat_fc_layers: int = option(3, "Number of dense layers after pooling in the teacher classifier", least=1, most=16)
    student_vgae_hidden_dims: str = option("80,40,16", "Widths of the student autoencoder's layers, the latent's last", widths=True, least=1, most=65536)
    student_vgae_heads: int = option(1, "Attention heads of the student autoencoder's first layer", least=1, most=256)
    student_vgae_embedding_dim: int = option(4, "Width of the CAN-id embedding in the student autoencoder", least=1, most=65536)
    student_gat_hidden: int = option(24, "Width of one attention head of the student classifier", least=1, most=65536)
    student_gat_layers: int = option(2, "Number of attention layers of the student classifier", least=1, most=64)
    student_gat_heads: int = option(4, "Attention heads of each layer of the student classifier", least=1, most=256)
    student_gat_embedding_dim: int = option(8, "Width of the CAN-id embedding in the student classifier", least=1, most=65536)
    student_gat_fc_layers: int = option(1, "Number of dense layers after pooling in the student classifier", least=1, most=16)
    gat_jk: str = option("cat", "Jumping knowledge of the classifier: how the outputs of its layers are joined", choices=("cat", "lstm"))
    vgae_dropout: float = option(0.15, "Dropout rate of the autoencoder", least=0.0, most=0.99)
    gat_dropout: float = option(0.2, "Dropout rate of the classifier", least=0.0, most=0.99)
    batch_size: int = option(4096, "Batch size, in graphs; auto: the largest that fits, planned once (`plimsoll plan can-kd`)", least=1, most=1048576,
                             auto=True)
    batch_size_max: int = option(8192, "Most graphs that batch_size = auto chooses", least=1, most=1048576, decides_bits=False)
    batch_nodes: int = option(0, "Most nodes of a batch; 0: no bound")
    batch_edges: int = option(0, "Most edges of a batch; 0: no bound")
    min_steps_per_epoch: int = option(8, "Least steps of an epoch: batches are made smaller rather than fewer", least=1, most=1000000)
    max_epochs: int = option(300, "Most epochs of a stage", least=1, most=1000000)
    patience: int = option(100, "Epochs without improvement that end a stage early", least=1, most=1000000)
    student_gat_patience: int = option(50, "Epochs without improvement that end the student classifier's stages early", least=1, most=1000000)
    vgae_lr: float = option(0.002, "Learning rate of the autoencoder", least=0.0, most=1000.0)
    gat_lr: float = option(0.003, "Learning rate of the classifier", least=0.0, most=1000.0)
    fusion_lr: float = option(0.001, "Learning rate of the fusion's Q-network", least=0.0, most=1000.0)
    weight_decay: float = option(0.0001, "Weight decay, added to the gradients (L2)", least=0.0, most=1000.0)
    gradient_clip: float = option(1.0, "Largest norm of a step's gradients (clipping); 0: no clipping", least=0.0, most=1000000.0)
    accumulate_grad_batches: int = option(1, "Number of batches whose gradients are accumulated for one optimizer step", least=1, most=1000000)
    precision: str = option("32", "Precision of matrix products; on the CPU 16-mixed is computed as bf16-mixed",
                            choices=("32", "bf16-mixed", "16-mixed"))
    use_scheduler: bool = option(False, "Learning-rate schedule: true to use scheduler_type, false for constant rates")
    scheduler_type: str = option("cosine", "Kind of learning-rate schedule", choices=("cosine", "step", "exponential"))
    scheduler_t_max: int = option(300, "Epochs until the cosine schedule is at its lowest; -1: max_epochs", least=-1, most=1000000)
    scheduler_step_size: int = option(50, "Epochs between two reductions of the step schedule", least=1, most=1000000)
    scheduler_gamma: float = option(0.1, "Factor of one reduction of the step and exponential schedules", least=0.0, most=1.0)
    gradient_checkpointing: bool = option(True, "Gradient checkpointing: layers are computed again for their gradients; less memory",
                                          decides_bits=False)
    use_kd: bool = option(True, "Knowledge distillation: the student also learns from the teacher")
    kd_temperature: float = option(4.0, "Softmax temperature for distillation", least=0.001, most=1000.0)
    kd_alpha: float = option(0.7, "Weight of the distillation loss; the task's loss has the rest", least=0.0, most=1.0)
    kd_vgae_latent_weight: float = option(0.5, "Weight of the distillation loss on the autoencoder's latent values", least=0.0, most=1000000.0)
    kd_vgae_recon_weight: float = option(0.5, "Weight of the distillation loss on the autoencoder's reconstructions", least=0.0, most=1000000.0)
    use_teacher_cache: bool = option(True, "Cache on disk of the teacher's outputs, by graph", decides_bits=False)
    clear_cache_every_n: int = option(100, "Steps between returns of the teacher cache's memory to the system; 0: never", decides_bits=False)
    offload_teacher_to_cpu: bool = option(False, "Teacher weights are read for each step and hold no memory between steps", decides_bits=False)
    curriculum_start_ratio: float = option(1.0, "Normal graphs per attack graph in the first epoch of the curriculum", least=0.0, most=1000000.0)
    curriculum_end_ratio: float = option(10.0, "Normal graphs per attack graph in the last epoch of the curriculum", least=0.0, most=1000000.0)
    difficulty_percentile: float = option(75.0, "Percentile of difficulty above which normal graphs are drawn, in the first epoch",
                                          least=0.0, most=100.0)
    difficulty_percentile_end: float = option(95.0, "Percentile of difficulty above which normal graphs are drawn, in the last epoch",
                                              least=0.0, most=100.0)
    use_vgae_mining: bool = option(True, "Difficulty of a graph is the autoencoder's error (true) or the classifier's loss (false)")
    difficulty_cache_update: int = option(10, "Epochs between scorings of all graphs' difficulty; 0: scored once", most=1000000)
    scoring_chunk: int = option(500, "Number of graphs scored at once; changes memory, not the scores", least=1, most=1048576, decides_bits=False)
    fusion_gat: str = option("curriculum", "Classifier that the fusion uses: the one of the curriculum or of the normal stage",
                             choices=("curriculum", "normal"))
    fusion_episodes: int = option(500, "Number of episodes of the fusion's Q-learning", least=1, most=1000000)
    fusion_hidden: int = option(128, "Width of the Q-network's hidden layers", least=1, most=65536)
    fusion_batch: int = option(128, "Batch size of the Q-network, in transitions from the replay buffer", least=1, most=1048576)
    fusion_replay: int = option(10000, "Replay buffer size, in transitions", least=1, most=100000000)
    fusion_gamma: float = option(0.9, "Discount factor of the Q-network", least=0.0, most=1.0)
    fusion_epsilon: float = option(0.2, "Exploration rate (epsilon) of the Q-learning at first", least=0.0, most=1.0)
    fusion_epsilon_decay: float = option(0.995, "Factor of the exploration rate from episode to episode", least=0.0, most=1.0)
    fusion_epsilon_min: float = option(0.01, "Lowest exploration rate of the Q-learning", least=0.0, most=1.0)
    fusion_target_update: int = option(100, "Steps between copies of the Q-network to its target network", least=1)
    original_students: str = option("", "Published students to evaluate beside this run's: a .safetensors file, or a folder of them", path=True)
    run_test: bool = option(True, "Evaluation on the test files at the end", decides_bits=False)
    test_every_n_epochs: int = option(5, "Epochs between evaluations on the test files during training; 0: none", most=1000000, decides_bits=False)
    log_every_n_steps: int = option(50, "Steps between recorded losses", least=1, decides_bits=False)
    save_top_k: int = option(1, "Model kept of a stage: 1: of its best epoch; 0: of its last", most=1)
    cleanup_every_n_steps: int = option(0, "Steps between returns of unused memory to the system; 0: after evaluations and under pressure only",
                                        decides_bits=False)
    cache_bytes: int = option(-1, "Memory of the graphs; 0: read from disk; -1: all graphs, if they fit", least=-1, size=True, decides_bits=False)

    @property
    def virtual_workers(self) -> int:
        """1 for several ranks: each makes every step whole, so that any number of them gives the bits of one process."""
        return int(ranks() > 1)

    def on_processor_because(self) -> str:
        return "device: ranks train on the processor" if ranks() > 1 else ""

    def size(self, role: str, name: str) -> Any:
        """Returns a size of the role's models: size("teacher", "gat_heads")."""
        return getattr(self, f"{role}_{name}")


def ranks() -> int:
    """Returns how many processes train the run together."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _check_ranks(options: Options) -> None:
    if ranks() != int(os.environ.get("LOCAL_WORLD_SIZE", ranks())):
        raise ValueError("can-kd: its ranks are processes of one machine; start them on one")
    if not options.batch_size:
        raise ValueError(f"batch_size = auto is planned for one process, and these are {ranks()} ranks; give batch_size a number")
    if options.device_name() != "cpu":
        raise ValueError(f"{options.on_processor_because()}, or --device cpu")


def before(options: Options) -> None:
    """Checks the ranks, and that published students can be read. Errors: ValueError naming the option; of originals_of()."""
    if ranks() > 1:
        _check_ranks(options)
    from ._run import originals_of  # Its libraries count as held before the run.

    if options.run_test or options.stage == "evaluation":
        originals_of(options)


def train(run: Run, options: Options) -> dict[str, Any]:
    from ._run import CanKd

    return CanKd(run, options).train()


def evaluate(options: Options) -> dict[str, Any]:
    from ._run import evaluate_run

    return Told(*evaluate_run(options))


def plan(options: Options, device: str, device_memory_limit: str) -> dict[str, Any]:
    from ._plan import plan_run

    return plan_run(options, device, device_memory_limit)


def weighed(options: Options, said: dict[str, Any]) -> tuple[Options, str, set[str]]:
    """Returns the options of the plan's tightest task alone, its name, and the choices that it has."""
    from ._training import is_taught
    from ._tasks import all_tasks

    [task] = [one for one in all_tasks() if one.name == said["task"]]
    names = set(RECIPE.choices) - (set() if is_taught(options, task) else {"offload_teacher_to_cpu"})
    return dataclasses.replace(options, stage=task.stage, model_size=task.role), task.name, names


RECIPE = Recipe(
    "can-kd", "Intrusion detection on CAN-bus graphs: a teacher, and a student of it", Options, train, evaluate, plan, before=before,
    unit="graphs", data="Graph set to train on (plimsoll import can)", presets=pathlib.Path(__file__).with_name("presets"),
    choices={"gradient_checkpointing": (True, False), "precision": ("32", "bf16-mixed"), "offload_teacher_to_cpu": (False, True)},
    weighed=weighed, accumulates="accumulate_grad_batches", threads_decide_bits=False,
    examples=("plimsoll train can-kd --data data/ --out run/ --memory-limit 1GiB --config small.toml",
              "plimsoll resume run/ --stage fusion --json       the next stage of the same run",
              "plimsoll train can-kd --data data/ --out run/ --model-size student --teacher-path teacher/"))
