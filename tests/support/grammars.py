"""A generator and a matcher for grammars of `nodes/gateway/gbnf.py`."""

import random
from collections.abc import Mapping

from nodes.gateway.gbnf import Alternatives, Chars, Concatenation, Grammar, Reference, Repetition, Text


class Speaker:
    """Generates a random text that a grammar allows."""

    def __init__(self, rules: Mapping[str, Grammar], seed: int) -> None:
        self._rules = rules
        self._chance = random.Random(seed)

    def says(self, part: Grammar, depth: int = 0) -> str:
        match part:
            case Text(text):
                return text
            case Chars(members):
                return self._one_of(members)
            case Reference(name):
                return self.says(self._rules[name], depth + 1)
            case Concatenation(parts):
                return "".join(self.says(one, depth) for one in parts)
            case Alternatives(options):
                # Deep inside, what comes last among the values is the shortest.
                return self.says(options[-1] if depth > 40 else self._chance.choice(options), depth)
            case Repetition(inside, least, most):
                most = least + 2 if most is None else min(most, least + 2)
                count = least if depth > 40 else self._chance.randint(least, most)
                return "".join(self.says(inside, depth) for _ in range(count))

    def _one_of(self, members: str) -> str:
        if members.startswith("^"):
            return self._chance.choice("aZ \u00e9/{[")
        plain = members.replace("\\\\", "\\")
        if len(plain) > 2 and plain[1] == "-":
            first, last = plain[0], plain[2]
            return chr(self._chance.randint(ord(first), ord(last)))
        return self._chance.choice(plain)


class Hearer:
    """Matches a text against a grammar; tracks all possible positions."""

    def __init__(self, rules: Mapping[str, Grammar], text: str) -> None:
        self._rules = rules
        self._text = text

    def whole(self) -> bool:
        return len(self._text) in self.after(self._rules["root"], 0)

    def after(self, part: Grammar, at: int) -> set[int]:
        match part:
            case Text(text):
                return {at + len(text)} if self._text.startswith(text, at) else set()
            case Chars(members):
                return {at + 1} if at < len(self._text) and _among(self._text[at], members) else set()
            case Reference(name):
                return self.after(self._rules[name], at)
            case Concatenation(parts):
                places = {at}
                for one in parts:
                    places = {end for place in places for end in self.after(one, place)}
                return places
            case Alternatives(options):
                return {end for option in options for end in self.after(option, at)}
            case Repetition(inside, least, most):
                return self._many(inside, least, most, at)

    def _many(self, inside: Grammar, least: int, most: int | None, at: int) -> set[int]:
        places, reached, count = {at}, set[int](), 0
        while places:
            if count >= least:
                reached |= places
            if count == most:
                break
            places = {end for place in places for end in self.after(inside, place)} - reached
            count += 1
        return reached


def _among(sign: str, members: str) -> bool:
    if members.startswith("^"):
        return sign not in '"\\' and ord(sign) >= 0x20 and ord(sign) != 0x7F
    plain = members.replace("\\\\", "\\")
    at = 0
    while at < len(plain):
        if plain[at + 1 : at + 2] == "-" and at + 2 < len(plain):
            if plain[at] <= sign <= plain[at + 2]:
                return True
            at += 3
        else:
            if plain[at] == sign:
                return True
            at += 1
    return False
