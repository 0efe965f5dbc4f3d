"""What the flows of training say at their end."""

from dataclasses import replace


def test_the_last_state_of_a_training_says_that_it_was_too_short() -> None:
    from flows.flows import _summarize_training
    from pipeline.training.trainer import TrainingResult

    remark = "pretrain has taken 9 steps, at 2.2 s each; …: pretrain.seconds=220 or more"
    enough = TrainingResult("runs/x", "pretrain", "runs/x/pretrain/checkpoints/step-00000009", 9, 20.0, 0.01, 0)
    assert _summarize_training(enough).startswith("9 steps in 20 s, 0.01 epochs; runs/x")
    said = _summarize_training(replace(enough, remark=remark))
    assert "too few to learn anything" in said and said.endswith(remark)
