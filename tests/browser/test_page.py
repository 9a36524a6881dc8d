"""The exported page: opens from disk under its policy, every control works, hostile text stays inert."""

from __future__ import annotations

import math
import re

import pytest
from conftest import RECORDED, show
from signals import HOSTILE, SKILL, hostile, long, shifts, trajectory

from seedkit.types import Skill
from seedkit.widgets import SkillInspector  # pyright: ignore[reportMissingImports]
from seedkit.widgets.inspector import SHOWN  # pyright: ignore[reportMissingImports]
from seedkit.widgets.signals import advantages_of  # pyright: ignore[reportMissingImports]

MARKED = """e => [...e.querySelectorAll('.sk-block span:not(.o, .e)')]
  .flatMap((s, i) => (s.classList.contains('sel') ? [i] : []))"""


def number(text):
    return math.nan if text == "–" else float(text.replace("−", "-"))


def card(root, name):
    """A number on the card."""
    return number(root.locator(f".sk-card [data-value='{name}']").inner_text())


def agrees(root, view):
    """Every number on the card equals Python's for the same token."""
    row = view.frame().iloc[view.token]
    columns = {"student s": "student_logp", "teacher k": "teacher_logp", "shift Δ": "delta", "gate": "gate"}
    columns |= {"advantage A": "advantage", "weight": "weight", "loss": "loss"}
    for name, column in columns.items():
        found, wanted = card(root, name), row[column]
        assert (math.isnan(found) and math.isnan(wanted)) or abs(found - wanted) <= 1e-6, (name, found, wanted)
    return True


@pytest.fixture
def recorded():
    view = SkillInspector.read({"right": RECORDED["right"], "wrong": RECORDED["wrong"]}, height=300)
    marks = {name: [float(p) + 0.1 * n for p in view.signals.behaviour] for n, name in enumerate(("first", "last"))}
    bounds = view.signals.bounds
    checkpoints = {name: [row[a:b] for a, b in bounds] for name, row in marks.items()}
    return SkillInspector(
        view.signals.trajectories,
        view.signals.shifts,
        skills=view.signals.skills,
        checkpoints=checkpoints,
        height=300,
    )


@pytest.fixture
def opened(open_tab, recorded, tmp_path):
    return show(open_tab(), recorded, tmp_path), recorded


def test_every_control_by_mouse(opened):
    root, view = opened
    page = root.page
    tokens = root.locator(".sk-block span:not(.o):not(.e)")
    tokens.nth(5).click()
    view.token = 5
    assert agrees(root, view)
    for name in SHOWN:
        root.get_by_label("method", exact=True).select_option(name)
        view.method, view.beta, view.coef = name, SHOWN[name].beta, SHOWN[name].coef
        assert agrees(root, view), name
    root.get_by_label("method", exact=True).select_option("seed")
    view.method, view.beta, view.coef = "seed", 5.0, 0.01
    for label, trait, value in (("β", "beta", 2.5), ("λ", "coef", 0.3)):
        root.get_by_label(f"{label}, exact").fill(str(value))
        root.get_by_label(f"{label}, exact").press("Enter")
        setattr(view, trait, value)
        assert root.get_by_label(label, exact=True).input_value() == str(value)
        assert agrees(root, view)
        box = root.get_by_label(label, exact=True).bounding_box()
        page.mouse.click(box["x"] + box["width"] * 0.8, box["y"] + box["height"] / 2)
        setattr(view, trait, float(root.get_by_label(label, exact=True).input_value()))
        assert getattr(view, trait) > value
        assert agrees(root, view)
    root.get_by_label("skill", exact=True).select_option("wrong")
    view.skill = "wrong"
    assert agrees(root, view)
    assert "go to its place and move it there" in root.locator(".sk-skill").inner_text()  # for a thing to be heated
    root.get_by_label("less", exact=True).select_option("right")
    wrong = view.frame()["delta"]
    view.skill = "right"
    assert abs(card(root, "diff") - (wrong - view.frame()["delta"])[5]) <= 2e-6
    root.get_by_label("skill", exact=True).select_option("right")
    for channel in (
        root.get_by_label("colour", exact=True).locator("option").evaluate_all("os => os.map(o => o.value)")
    ):
        root.get_by_label("colour", exact=True).select_option(channel)
        root.get_by_label("underline", exact=True).select_option(channel)
        assert channel in ("advantage", "kl") or root.locator(".sk-block span[class*=b]").count() > 3, channel
    slider = root.get_by_label("checkpoint", exact=True)
    assert abs(card(root, "checkpoint") - 0.0) <= 1e-6
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
    assert root.locator("output", has_text="last").count() == 1
    assert abs(card(root, "checkpoint") - 0.1) <= 1e-6
    root.get_by_label("trajectory", exact=True).select_option("3")
    view.trajectory = 3
    root.get_by_role("button", name="next by size").click()
    view.token = int(view.frame()["delta"].abs().idxmax())
    assert agrees(root, view)
    turns = len(view.signals.trajectories[3].turns)
    root.get_by_role("button", name="fold or unfold").click()
    assert root.locator("section.folded").count() == turns
    root.locator(".sk-turn").first.click()
    assert root.locator("section.folded").count() == turns - 1
    root.get_by_role("button", name="text or table").click()
    assert root.locator("tr[data-token]").count() == len(view.frame())
    root.locator("tr[data-token]").nth(2).click()
    view.token = 2
    assert agrees(root, view)
    root.get_by_role("button", name="gate", exact=True).click()
    column = [number(t) for t in root.locator("tr[data-token] td:nth-child(8)").all_inner_texts()]
    assert column == sorted(column, reverse=True) and len(set(column)) > 5


def test_every_control_by_keyboard(opened):
    root, view = opened
    page = root.page
    text = root.locator(".sk-text")
    text.focus()

    def press(*keys):
        for key in keys:
            page.keyboard.press(key)
        words = root.locator(".sk-card").inner_text()
        view.token = int(re.findall(r"token (\d+) of", words)[0]) - 1
        return view.token

    assert press("ArrowRight") == 0 and press("ArrowRight") == 1 and press("ArrowLeft") == 0
    assert press("End") == len(view.frame()) - 1 and press("Home") == 0
    second_turn = list(view.frame()["turn"]).index(1)
    assert press("]") == second_turn and press("[") == 0
    order = view.frame()["delta"].abs().sort_values(ascending=False, kind="stable").index
    at = list(order).index(0)
    assert press("n") == order[at + 1] and press("p") == order[at]
    press("End")
    assert agrees(root, view)
    press("c")
    assert root.locator("section.folded").count() == 1
    press("c")
    assert root.locator("section.folded").count() == 0
    page.keyboard.press("t")
    assert root.locator(".sk-table").is_visible()
    page.keyboard.press("t")
    assert text.is_visible()
    page.keyboard.press("/")
    page.keyboard.type("cabinet")
    assert re.fullmatch(r"1 of \d+", root.locator(".sk-found").inner_text())
    page.keyboard.press("Enter")
    assert root.locator(".sk-found").inner_text().startswith("2 of")
    page.keyboard.press("Shift+Enter")
    assert root.locator(".sk-found").inner_text().startswith("1 of")
    page.keyboard.press("Escape")
    # selects, sliders and number fields are the browser's own, reached with Tab
    root.get_by_label("β", exact=True).focus()
    page.keyboard.press("ArrowRight")
    view.beta = 5.1
    assert agrees(root, view)
    root.get_by_label("method", exact=True).focus()
    page.keyboard.press("ArrowUp")
    view.method = list(SHOWN)[list(SHOWN).index("seed") - 1]
    view.beta, view.coef = SHOWN[view.method].beta, SHOWN[view.method].coef
    assert agrees(root, view)
    root.get_by_label("checkpoint", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert abs(card(root, "checkpoint") - 0.1) <= 1e-6
    root.get_by_role("button", name="fold or unfold").focus()
    page.keyboard.press("Enter")
    assert root.locator("section.folded").count() == len(view.signals.trajectories[0].turns)


def test_charts_select_tokens_by_mouse_and_keyboard(opened):
    root, view = opened
    page = root.page
    frame = view.frame()

    def chosen():
        """Marked tokens, wherever they are: the text is scrolled until all were painted."""
        for top in range(0, root.locator(".sk-text").evaluate("e => e.scrollHeight"), 200):
            root.locator(".sk-text").evaluate("(e, top) => { e.scrollTop = top; }", top)
            page.wait_for_timeout(80)
        return root.locator(".sk-text").evaluate(MARKED)

    root.locator(".sk-chart").first.locator("rect", has_text="verb, turn 2:").click()
    wanted = frame.index[(frame["class"] == "verb") & (frame["turn"] == 1)]
    assert root.locator(".sk-chosen").inner_text().startswith(f"{len(wanted)} token")
    assert chosen() == list(wanted)
    root.get_by_role("button", name="clear the selection").click()
    assert chosen() == []
    bars = root.locator(".sk-chart").nth(1).locator("g.sk-cell")
    first, last = bars.nth(0).bounding_box(), bars.nth(14).bounding_box()
    page.mouse.move(first["x"] + 2, first["y"] + 20)
    page.mouse.down()
    page.mouse.move(last["x"] + 2, last["y"] + 20, steps=20)
    page.mouse.up()
    half = number(root.locator(".sk-chart").nth(1).locator("text").all_text_contents()[-1])
    below = frame.index[frame["delta"] < -half + 2 * half * 15 / 31]
    assert len(below) > 1 and chosen() == list(below)
    assert root.locator(".sk-chosen").inner_text().startswith(f"{len(below)} token")
    page.keyboard.press("Escape")
    root.locator(".sk-chart svg").nth(1).focus()
    page.keyboard.press("ArrowRight")  # from the bar where the drag ended
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Enter")
    low, high = -half + 2 * half * 15 / 31, -half + 2 * half * 17 / 31
    inside = frame.index[(frame["delta"] >= low) & (frame["delta"] < high)]
    assert root.locator(".sk-chosen").inner_text().startswith(f"{len(inside)} token")
    page.keyboard.press("Escape")
    root.locator(".sk-chart svg").first.focus()
    for _ in range(3):  # back to the first cell
        page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert chosen() == list(frame.index[(frame["class"] == "verb") & (frame["turn"] == 0)])


def test_scrolled_away_and_back_colours_stay(opened):
    root, _ = opened
    text = root.locator(".sk-text")
    classes = "e => [...e.querySelectorAll('.sk-block span:not(.o)')].map((s) => s.className)"
    root.get_by_label("colour", exact=True).select_option("gate")
    before = text.evaluate(classes)
    text.evaluate("e => { e.scrollTop = e.scrollHeight; }")
    root.page.wait_for_timeout(200)
    away = text.evaluate(classes)
    assert all(away[-20:])
    root.get_by_label("colour", exact=True).select_option("student")  # while the first turns are out of sight
    assert text.evaluate(classes)[-20:] != away[-20:]  # and the last ones in sight
    text.evaluate("e => { e.scrollTop = 0; }")
    root.page.wait_for_timeout(200)
    root.get_by_label("colour", exact=True).select_option("gate")
    back = text.evaluate(classes)
    assert back[:12] == before[:12] and all(back[:12])


# Keeps what the page wants to do later until the test lets it.
HOLD = """(() => { const later = new Map(); let n = 0;
  window.setTimeout = (f) => { later.set(++n, f); return n; };
  window.clearTimeout = (id) => later.delete(id);
  window.pass = () => { for (const [id, f] of [...later].slice(0, 1)) { later.delete(id); f(); }
    return later.size; }; })()"""


@pytest.fixture
def begun(open_tab, tmp_path):
    """A view of two long episodes in which only what fills the window has been drawn."""
    (t, words), (other, _) = long(12_000, 8, 500), long(9_000, 3, 500, seed=1)
    view = SkillInspector([t, other], [shifts(t), shifts(other)], skills=[SKILL] * 2, policy=words, height=300)
    tab = open_tab(permissions=["clipboard-read", "clipboard-write"])
    tab.page.add_init_script(HOLD)
    root = show(tab, view, tmp_path)
    assert root.locator(".sk-text").get_attribute("aria-busy") == "true"
    assert 0 < root.locator("section").count() < 8
    assert root.locator(".sk-text").evaluate("e => e.scrollHeight > 2 * e.clientHeight")
    return root, view


def whole(root, view):
    """Every token of the shown episode stands in the text, once and in its place."""
    shown = root.locator(".sk-block").evaluate_all("es => es.map((e) => e.textContent).join('')")
    turns = view.signals.trajectories[view.trajectory].turns
    ids = [i for turn in turns for i in (*turn.context_ids, *turn.response_ids)]
    assert shown == "".join(view.signals.vocabulary[i].decode() for i in ids)
    assert root.locator("section").count() == len(turns)
    assert root.locator(".sk-text").get_attribute("aria-busy") == "false"


def test_the_rest_of_a_long_text_follows_by_itself(begun):
    root, view = begun
    spans = root.locator(".sk-block span:not(.o)")
    first = spans.nth(7).element_handle()
    spans.nth(7).click()
    before = spans.count()
    root.page.evaluate("window.pass()")
    assert spans.count() > before
    for _ in range(1000):
        if root.page.evaluate("window.pass()") == 0:
            break
    whole(root, view)
    view.token = 7
    assert agrees(root, view)
    assert "cur" in first.get_attribute("class").split()
    text = root.locator(".sk-text")
    text.evaluate("e => { e.scrollTop = e.scrollHeight; }")
    root.page.wait_for_timeout(200)
    assert all(text.evaluate("e => [...e.querySelectorAll('span:not(.o)')].slice(-20).map((s) => s.className)"))


def test_what_is_not_drawn_yet_can_be_jumped_to(begun):
    root, view = begun
    text = root.locator(".sk-text")
    for key, token in (("n", int(view.frame()["delta"].abs().idxmax())), ("End", len(view.frame()) - 1)):
        text.focus()
        root.page.keyboard.press(key)
        view.token = token
        assert agrees(root, view)
        current = root.locator(".cur")
        word = view.signals.vocabulary[view.frame()["token_id"][token]].decode()
        assert current.evaluate("e => e.textContent") == word
        inner, outer = current.bounding_box(), text.bounding_box()
        assert outer["y"] <= inner["y"] and inner["y"] + inner["height"] <= outer["y"] + outer["height"] + 1
    root.page.wait_for_timeout(200)
    assert re.search(r"\bb\d+", current.get_attribute("class"))


def test_a_turn_that_is_not_drawn_yet_can_be_selected_in_the_heat_map(begun):
    root, view = begun
    root.locator(".sk-chart").first.locator("rect", has_text="object, turn 8:").click()
    frame = view.frame()
    wanted = frame.index[(frame["class"] == "object") & (frame["turn"] == 7)]
    assert root.locator(".sk-chosen").inner_text().startswith(f"{len(wanted)} token")
    root.page.wait_for_timeout(200)
    assert "sel" in root.locator(".cur").get_attribute("class").split()
    view.token = int(wanted[0])
    assert agrees(root, view)


def test_search_finds_what_is_not_drawn_yet(begun):
    root, view = begun
    word = view.signals.vocabulary[view.frame()["token_id"].iloc[-1]].decode()
    ids = [i for turn in view.signals.trajectories[0].turns for i in (*turn.context_ids, *turn.response_ids)]
    text = "".join(view.signals.vocabulary[i].decode() for i in ids)
    root.get_by_label("search the text").fill(word)
    assert root.locator(".sk-found").inner_text() == f"1 of {text.count(word)}"
    whole(root, view)


def test_copies_and_folds_take_what_is_not_drawn_yet(begun):
    root, view = begun
    root.get_by_role("button", name="fold or unfold").click()
    assert root.locator("section.folded").count() == 8
    whole(root, view)
    root.get_by_label("trajectory", exact=True).select_option("1")
    view.trajectory = 1
    assert root.locator("section").count() < 3
    root.locator(".sk-text").evaluate(
        "e => getSelection().setBaseAndExtent(e, 0, document.body, document.body.childNodes.length)"
    )
    root.page.keyboard.press("Control+c")
    whole(root, view)
    turns = view.signals.trajectories[1].turns
    wanted = b"".join(view.signals.vocabulary[i] for u in turns for i in (*u.context_ids, *u.response_ids))
    assert root.page.evaluate("navigator.clipboard.readText()") == wanted.decode()


def test_another_episode_while_the_first_is_being_drawn(begun):
    root, view = begun
    root.page.evaluate("window.pass()")
    root.get_by_label("trajectory", exact=True).select_option("1")
    view.trajectory = 1
    for _ in range(1000):
        if root.page.evaluate("window.pass()") == 0:
            break
    whole(root, view)


def test_books_agree_with_the_ledger_or_say_by_how_much(open_tab, recorded, tmp_path):
    from seedkit.io import Ledger

    some = recorded.signals.trajectories
    losses = [recorded.frame(n)["loss"].sum() / 1000 for n in range(len(some))]
    given = {"skills": recorded.signals.skills}
    for wrong in (0.0, 1e-3):
        logged = Ledger("seed", 5.0, 0.01, 1000, tuple(advantages_of(some)), tuple(x + wrong for x in losses))
        view = SkillInspector(some, recorded.signals.shifts, ledger=logged, **given)
        root = show(open_tab(), view, tmp_path, f"books{wrong}.html")
        books = root.locator(".sk-books")
        assert books.get_attribute("data-agree") == ("no" if wrong else "yes")
        assert ("differ by -1.00e-3" if wrong else "they agree") in books.inner_text()
        root.get_by_label("β, exact").fill("2")
        root.get_by_label("β, exact").press("Enter")
        assert "choose these to compare" in books.inner_text()


@pytest.mark.parametrize(
    "case", ["none", "absent", "misaligned", "lengths", "nan", "empty", "one", "truncated", "nothing"]
)
def test_every_state_can_be_read(open_tab, tmp_path, case):
    from dataclasses import replace

    words = {n: f" w{n}".encode() for n in range(9)}
    t = trajectory([((0, 1), (2, 3)), ((4,), (5, 6))], truncated=case == "truncated")
    one = shifts(t)
    rows = {
        "none": [None],
        "absent": [replace(one, skill_tokens=0, mask=(False,) * 4, reason="cut off")],
        "misaligned": [replace(one, response_ids=(2, 3, 5, 7))],
        "lengths": [replace(one, teacher_logp=one.teacher_logp[:2])],
        "nan": [replace(one, teacher_logp=(math.nan, *one.teacher_logp[1:]))],
    }
    if case == "empty":
        t = trajectory([((0, 1), ())])
        rows["empty"] = [shifts(t)]
    if case == "one":
        t = trajectory([((0,), (3,))])
        rows["one"] = [shifts(t)]
    given = None if case == "nothing" else rows.get(case, [one])
    view = SkillInspector([t], given, skills=given and [SKILL], policy=words)
    root = show(open_tab(), view, tmp_path)
    told = root.locator(".sk-status").inner_text()
    wanted = {
        "none": "No skill reached the teacher: none was given",
        "absent": "No skill reached the teacher: cut off",
        "misaligned": "Misaligned: the shifts hold other tokens, from token 4 on",
        "lengths": "Misaligned: the trajectory has 4 sampled tokens, but teacher_logp has 2",
        "nan": "1 log-probabilities are not finite",
        "empty": "Empty: no token was sampled",
        "one": "",
        "truncated": "Truncated: the episode was cut off",
        "nothing": "No shifts were given",
    }[case]
    assert wanted in told and (told == "") == (wanted == "")
    root.locator(".sk-text").focus()
    root.page.keyboard.press("ArrowRight")
    if case != "empty":
        view.token = 0
        assert agrees(root, view)
    unknown = {"none": 4, "absent": 4, "misaligned": 4, "lengths": 4, "nan": 1, "nothing": 4}.get(case, 0)
    assert root.locator(".sk-block .na").count() == unknown


def test_no_trajectory_at_all(open_tab, tmp_path):
    root = show(open_tab(), SkillInspector([], None, policy={}), tmp_path)
    assert "No trajectory to show" in root.locator(".sk-status").inner_text()


def raw(tokens):
    return b"".join(tokens).decode("utf-8", "replace")


def test_hostile_tokens_stay_inert_and_visible_and_copy_as_they_were(open_tab, tmp_path):
    t, words = hostile()
    view = SkillInspector([t], [shifts(t)], skills=[Skill("</script><b>bold</b> \u202e")], policy=words)
    tab = open_tab(permissions=["clipboard-read", "clipboard-write"])
    root = show(tab, view, tmp_path)
    page = root.page
    text = root.locator(".sk-text")
    assert root.locator("img, script, b >> text=bold").count() == 0
    shown = text.inner_text()
    for word in (
        "</script><img src=x onerror=alert(1)>",
        "<!--",
        "<tool_call>",
        "&lt;",
        "&#x202e;",
        "{{7*7}}",
        "한국어",
        "مرحبا",
    ):
        assert word in shown, word
    marks = text.locator("span:not(.o) > .e").evaluate_all("es => es.map((e) => e.dataset.e)")
    assert {"\\u202E", "\\u0000"} <= set(text.locator(".o .e").evaluate_all("es => es.map((e) => e.dataset.e)"))
    for mark in (
        "\\u202E",
        "\\u202C",
        "\\u200B",
        "\\u2066",
        "\\u2028",
        "\\uFEFF",
        "\\xE2",
        "\\xFF",
        "\\u0000",
        "\\u001B",
        "\\u{E0041}",
        "\\u000D",
    ):
        assert mark in marks, mark
    groups = text.locator("[data-group]").evaluate_all("es => es.map((e) => [e.textContent, e.dataset.group])")
    assert ["😀", "2"] in groups and ["안", "2"] in groups  # split over tokens: one glyph, one segment a token
    assert text.locator("[data-w='↵']").count() >= 1 and text.locator("[data-w='∅']").count() >= 1
    page.evaluate("""() => { const r = document.createRange();
      r.selectNodeContents(document.querySelector('.sk-text'));
      getSelection().removeAllRanges(); getSelection().addRange(r); }""")
    page.keyboard.press("Control+c")
    copied = page.evaluate("navigator.clipboard.readText()")
    half = [*HOSTILE]
    wanted = raw(half) + raw(half) + raw(half) + raw(half[::-1])
    ready = copied.replace("\r\n", "\n")
    assert ready.replace("\x00", "") == wanted.replace("\r\n", "\n").replace("\x00", "")
    text.focus()
    for _ in range(len(HOSTILE) * 2):  # the card can show each of them
        page.keyboard.press("ArrowRight")
        assert root.locator(".sk-card .sk-token").inner_text() != ""


def test_wide_window_and_narrow_window_hold_everything(open_tab, recorded, tmp_path):
    for width, height in ((1280, 800), (600, 700), (380, 700)):
        root = show(open_tab(width, height), recorded, tmp_path, f"{width}.html")
        overflow = root.evaluate("""e => [...e.querySelectorAll('select, input, button, svg, .sk-card, output')]
          .filter((n) => n.offsetParent !== null || n instanceof SVGElement)
          .filter((n) => n.getBoundingClientRect().right > e.getBoundingClientRect().right + 1)
          .map((n) => n.outerHTML.slice(0, 80))""")
        assert overflow == []
        unnamed = root.evaluate("""e => [...e.querySelectorAll('select, input, button')]
          .filter((n) => !(n.getAttribute('aria-label') || n.textContent.trim())).map((n) => n.outerHTML)""")
        assert unnamed == []


def test_the_policy_of_the_page_allows_nothing_else(open_tab, recorded, tmp_path):
    tab = open_tab()
    root = show(tab, recorded, tmp_path)
    policy = root.page.locator("meta[http-equiv='Content-Security-Policy']").get_attribute("content") or ""
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    ran = root.page.evaluate("""() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';
      document.body.append(s); return window.ran === 1; }""")
    assert ran is False
