"""From a recipe to a trained model, in a folder that survives.

Start at `loop.py`: the one function that trains, read from top to bottom. What it calls, in this order: `recipe.py`
(a TOML file to what is trained on what), `beginning.py` (new or resumed), `schedule.py`, `objective.py` and `loss.py`
(a batch to its loss), `learner.py` (all that training changes),
`metrics.py` and `display.py` (what is written down and shown), `validate.py`, `runs.py` (checkpoints that survive a
kill), `ending.py` (model, picture, sample). `distributed.py` is the only file that knows of ranks.
"""
