"""Two smaller views: the gate's curve under a trajectory's tokens, and a skill that one edits and scores again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets
import numpy as np
import traitlets

from seedkit.policy import Policy, PolicyError
from seedkit.rescoring import contrast, rescore
from seedkit.types import Shifts, Skill, Trajectory

from .export import EXPORT
from .inspector import STATIC, SkillInspector, _View
from .signals import Signals


class GateExplorer(_View):
    """The gate σ(βΔ) with a trajectory's tokens as points on it.

    Args:
        trajectory: a finished episode.
        shifts: its shifts under a skill.
        beta: steepness to begin with, 1/nat.
        policy: as for `SkillInspector`.

    Traits: beta, token (index of the chosen response token, -1 for none). `link` ties both to an inspector.
    """

    _esm = (STATIC / "inspector.js").read_text(encoding="utf-8").replace(EXPORT, "") + (STATIC / "gate.js").read_text(
        encoding="utf-8"
    )

    def __init__(self, trajectory: Trajectory, shifts: Shifts, *, beta: float = 5.0, policy: Any = None) -> None:
        signals = Signals([trajectory], [shifts], policy=policy)
        arrays, about = signals.layout()
        arrays |= signals.words(arrays["ids"])
        arrays |= {
            name: getattr(signals, name) for name in ("student", "teacher", "taught", "behaviour", "advantage")
        }
        meta = {"trajectories": about, "skills": list(signals.shifts), "responses": len(signals.behaviour)}
        buffers = {name: np.ascontiguousarray(array).tobytes() for name, array in arrays.items()}
        super().__init__(beta=float(beta), meta=meta, **buffers)

    def link(self, inspector: SkillInspector) -> GateExplorer:
        """Let β and the current token be one with an inspector's."""
        for name in ("beta", "token"):
            traitlets.link((inspector, name), (self, name))
        return self


class SkillEditor(ipywidgets.VBox):
    """Edit a skill's text, score again, and see the shift before and after on the same tokens.

    Args:
        policy: the student and teacher.
        trajectories: finished episodes; all are scored again, one after the other.
        skill: the text to begin with.

    Attributes:
        inspector: shows "before" and "after"; its channel `diff` is after less before.
        shifts: "before" and "after", as given to the inspector.
    """

    def __init__(self, policy: Policy, trajectories: Sequence[Trajectory], skill: Skill | str = "") -> None:
        self.policy, self.trajectories = policy, list(trajectories)
        words = skill.episode if isinstance(skill, Skill) else skill
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self.text = ipywidgets.Textarea(words, description="skill", rows=3, layout={"width": "98%"})
        self.button = ipywidgets.Button(description="re-score", tooltip="score the same tokens under this text")
        self.stop = ipywidgets.Button(description="cancel", disabled=True, tooltip="keep what was there")
        self.progress = ipywidgets.IntProgress(max=len(self.trajectories), description="scored")
        self.message = ipywidgets.Label()
        self.button.on_click(lambda _: self.start())
        self.stop.on_click(lambda _: self.cancel())
        before = self._score(words, lambda _: True)
        assert before is not None
        self.shifts = {"before": before[0], "after": before[0]}
        self.inspector = self._inspector(before, before)
        self._before = before
        row = ipywidgets.HBox([self.button, self.stop, self.progress, self.message])
        super().__init__([self.text, row, self.inspector])

    def start(self) -> None:
        """Score under the text as it stands, in the background."""
        if self._thread and self._thread.is_alive():
            return
        self._cancelled.clear()
        self.button.disabled, self.stop.disabled = True, False
        self.progress.value, self.message.value = 0, ""
        self._thread = threading.Thread(target=self._run, args=(self.text.value,), daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Stop after the trajectory that is being scored; the view stays as it was."""
        self._cancelled.set()

    def wait(self, seconds: float | None = None) -> None:
        """Block until scoring has ended."""
        if self._thread:
            self._thread.join(seconds)

    def _run(self, words: str) -> None:
        def go_on(done: int) -> bool:
            self.progress.value = done
            return not self._cancelled.is_set()

        try:
            after = self._score(words, go_on)
            if after is None:
                self.message.value = "cancelled; nothing has changed"
            else:
                self.shifts = {"before": self._before[0], "after": after[0]}
                fresh = self._inspector(self._before, after)
                fresh.other = "before"
                fresh.trajectory, fresh.token = self.inspector.trajectory, self.inspector.token
                self.inspector = fresh
                self.children = [*list(self.children)[:2], fresh]
                unknown = self.policy.encode(words).count(self.policy.tokenizer.unk_token_id)
                self.message.value = f"{unknown} unknown tokens in the text" if unknown else "done"
        except (ValueError, PolicyError) as error:
            self.message.value = str(error)
        finally:
            self.button.disabled, self.stop.disabled = False, True

    def _score(self, words: str, go_on: Callable[[int], bool]) -> tuple[list, list, list] | None:
        """Shifts, contrasts and skills of all trajectories; None when `go_on` says stop."""
        skill = Skill(words) if words.strip() else Skill(reason="the text is empty")
        shifts, contrasts = [], []
        for n, trajectory in enumerate(self.trajectories):
            if not go_on(n):
                return None
            shifts += rescore(self.policy, [trajectory], [skill])
            contrasts += contrast(self.policy, [trajectory], [skill])
        return (shifts, contrasts, [skill] * len(shifts)) if go_on(len(shifts)) else None

    def _inspector(self, before: tuple, after: tuple) -> SkillInspector:
        both = [{"after": a, "before": b} for b, a in zip(before, after, strict=True)]
        return SkillInspector(
            self.trajectories, both[0], contrasts=both[1], skills=both[2], policy=self.policy, height=300
        )
