"""What every page must hold: nothing serious for axe, all of it by keyboard, no scrolling sideways."""

from functools import cache
from typing import Any

from playwright.sync_api import Page

from tests.support.cluster import ROOT

SERIOUS = ("serious", "critical")
ALSO = ("heading-order",)
"""Rules that count although axe calls them moderate (review P15)."""
MAX_TABS = 400
_AXE = ROOT / "static" / "node_modules" / "axe-core" / "axe.min.js"
_RUN = """async () => {
  const found = await axe.run(document, {
    resultTypes: ["violations"], rules: { "label-content-name-mismatch": { enabled: true } },
  });
  return found.violations.map((one) => ({
    id: one.id, impact: one.impact, help: one.help,
    nodes: one.nodes.slice(0, 5).map((node) =>
      `${node.target.join(" ")} ${node.any.map((why) => why.message).join("; ")}`),
  }));
}"""
_FOCUS = """() => {
  const element = document.activeElement;
  if (element === null || element === document.body || element === document.documentElement) return null;
  const style = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  element.dataset.walked ??= String(document.querySelectorAll("[data-walked]").length);
  return {
    number: Number(element.dataset.walked),
    name: element.getAttribute("aria-label") || element.textContent.trim().slice(0, 60) || element.tagName,
    tag: element.tagName.toLowerCase(), role: element.getAttribute("role") ?? "",
    ring: outlined || style.boxShadow !== "none",
    top: box.top + scrollY, left: box.left, width: box.width, height: box.height,
  };
}"""
_WIDTHS = """async () => {
  const frame = () => new Promise(requestAnimationFrame);
  for (let same = 0, before = 0, frames = 0; same < 3 && frames < 120; frames += 1) {
    await frame();
    const width = document.scrollingElement.scrollWidth;
    same = width === before ? same + 1 : 0;
    before = width;
  }
  const room = document.documentElement.clientWidth;
  const inside = (element) => {
    for (let up = element.parentElement; up !== null; up = up.parentElement)
      if (/(auto|scroll|hidden|clip)/.test(getComputedStyle(up).overflowX)) return true;
    return false;
  };
  const wide = [...document.body.querySelectorAll("*")].filter((element) => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.right > room + 1 && !inside(element);
  });
  return {
    scroll: document.scrollingElement.scrollWidth, room,
    wide: wide.slice(0, 5).map((one) => `${one.tagName}.${one.className} ${one.textContent.slice(0, 40)}`),
  };
}"""


@cache
def _axe() -> str:
    return _AXE.read_text(encoding="utf-8")


_FINISH = """() => document.getAnimations()
  .filter((one) => Number.isFinite(one.effect?.getComputedTiming().endTime)).forEach((one) => one.finish())"""


def violations(page: Page) -> list[str]:
    """What axe calls serious or worse on the page as it is now, and what is out of order or named twice.

    What fades is at its end: half faded it has too little contrast. The source is evaluated by the debugger,
    which the page's policy does not bind.
    """
    page.evaluate(_axe())
    page.evaluate(_FINISH)
    found: list[dict[str, Any]] = page.evaluate(_RUN)
    return [
        f"{one['id']} ({one['impact']}): {one['help']}: {one['nodes']}"
        for one in found
        if one["impact"] in SERIOUS or one["id"] in ALSO
    ]


def walk(page: Page) -> list[dict[str, Any]]:
    """Everything that Tab reaches from the top of the page, in order, each once; ends where it began."""
    page.evaluate("document.activeElement?.blur()")
    stops: list[dict[str, Any]] = []
    for _ in range(MAX_TABS):
        page.keyboard.press("Tab")
        stop = page.evaluate(_FOCUS)
        if stop is None or stop["number"] < len(stops):
            return stops
        stops.append(stop)
    raise AssertionError(f"Tab goes on forever: {[stop['name'] for stop in stops[-10:]]}")


def sideways(page: Page) -> list[str]:
    """What makes the page scroll sideways; empty if it does not.

    Looked at once the page has had one width for a few frames: what follows the size of the window by script
    comes after it.
    """
    found: dict[str, Any] = page.evaluate(_WIDTHS)
    if found["scroll"] <= found["room"] and not found["wide"]:
        return []
    return [f"{found['scroll']} px in a room of {found['room']}", *found["wide"]]


def choose(page: Page, label: str, option: str) -> None:
    """Choose an option of a list by its words."""
    page.get_by_role("combobox", name=label).click()
    page.get_by_role("option", name=option, exact=True).click()


_OVERLAPS = """() => [...document.querySelectorAll("[role=grid] tbody tr")].flatMap((row) =>
  [...row.querySelectorAll("td *")].filter((element) => {
    const cell = element.closest("td").getBoundingClientRect();
    const box = element.getBoundingClientRect();
    for (let up = element.parentElement; up.tagName !== "TD"; up = up.parentElement)
      if (getComputedStyle(up).overflowX !== "visible") return false;
    const { top, bottom } = row.getBoundingClientRect();
    return box.width > 1 && (box.left < cell.left - 1 || box.right > cell.right + 1
      || box.top < top - 1 || box.bottom > bottom + 1);
  }).map((element) => `${element.closest("td").className}: ${element.textContent}`))"""


def overlaps(page: Page) -> list[str]:
    """Return what leaves its cell of a grid."""
    return list(page.evaluate(_OVERLAPS))
