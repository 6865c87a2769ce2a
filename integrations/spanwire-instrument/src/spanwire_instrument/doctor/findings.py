"""PURE: facts of a run to findings: what to change, where, and what it costs now.

Each threshold says why it is what it is. Shares and percentiles are only spoken of where there are calls enough; what
happened as such, such as a retry, is said however few there were. A finding never says more than was seen.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, TypeVar

import msgspec

from spanwire.report.findings import count, duration, percent
from spanwire.timeline import SEGMENTS

from .facts import Call, Client, Context, Run, Site
from .lines import Construction, construction, shown, with_statement
from .reuse import EXPIRES_S, Cold, Why, avoidable

__all__ = ["ENOUGH", "Finding", "Where", "enough", "findings", "split"]

#: Calls that it takes to speak of shares: with four, one call is a quarter.
ENOUGH = 5
#: From so many calls on, the slowest twentieth is one call at least. Of fewer, the p95 is just the slowest call: the first
#: one as a rule, which has to open a connection.
_P95_FROM = 20
#: Made so often in one place, it is made again and again: two may be a test and its repetition.
_AGAIN = 3
#: Connections that need not have been opened, as a share of calls: one in ten adds a handshake to the p90.
_AVOIDABLE = 0.1
#: What a handshake may take of the time to the first content among the slowest calls.
_HANDSHAKE = 0.1
#: Below that a handshake is nothing to act on, in seconds: one on the same machine takes a third of it.
_HANDSHAKE_S = 0.001
#: What waits for a connection may take of all time.
_POOL = 0.05
#: Below that for each call, neither these waits nor those below are noticed by anybody, in seconds.
_NOTICED_S = 0.01
#: What looks-up may take of the time to the first content; a cached one takes less than a millisecond.
_LOOKUP_S = 0.001
#: CPU time for each token, in seconds. A core then carries 20 streams of 50 tokens a second and nothing else.
_CPU_PER_TOKEN_S = 0.001
#: Fewer tokens tell of the call's beginning and not of the stream.
_TOKENS = 20
#: Time in which an answer was there and nobody fetched it, as a share of all time.
_WAITING = 0.05
#: Time of the server, as a share of all, from which on the client is not what to work on.
_SERVER = 0.8
#: Its queue, likewise, from which on it is what to look at.
_SERVER_QUEUE = 0.3
#: SDKs whose clients take ``http_client``; and the models that take two, for which there is a helper.
_SDKS = ("openai", "anthropic")
_CHAT_OPENAI = ("ChatOpenAI", "AzureChatOpenAI")

#: Why one client loses connections, and the kind of finding that it is.
_LOST: Mapping[Why, str] = {
    "stream": "stream_drops_connection",
    "idle": "idle_connections_expire",
    "left": "left_early",
    "closed": "closed_by_server",
}

Severity = Literal["high", "medium", "note"]
_ORDER: Mapping[str, int] = {"high": 0, "medium": 1, "note": 2}


class Where(msgspec.Struct, frozen=True):
    """A line of the user's code."""

    file: str
    line: int
    function: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing.

    Attributes:
        kind: a name for it that stays.
        severity: ``high`` and ``medium``: something to change. ``note``: something to know.
        title: one line.
        evidence: what was seen, in numbers; a sentence each.
        where: the lines of the program that it is about, the first one above all.
        change: what to do about it, in words; empty for nothing.
        now, instead: the line as it is, and as it would be; empty for none.
    """

    kind: str
    severity: Severity
    title: str
    evidence: tuple[str, ...]
    where: tuple[Where, ...] = ()
    change: str = ""
    now: str = ""
    instead: str = ""


class Share(msgspec.Struct, frozen=True):
    """One row of the split of the time: a segment, and its part of all time of all completed calls."""

    segment: str
    seconds: float
    share: float


def enough(run: Run) -> bool:
    """There are calls enough to speak of shares."""
    return len(_whole(run)) >= ENOUGH


def split(run: Run) -> list[Share]:
    """Where the time of the completed calls went; empty if there is none. The shares add up to 1."""
    calls = _whole(run)
    total_s = sum(call.total_s for call in calls)
    names = {name: sum(call.segment_s(name) for call in calls) for name in SEGMENTS}
    if not total_s:
        return []
    return [Share(name, seconds, seconds / total_s) for name, seconds in names.items() if seconds > 0]


def findings(run: Run, code: Mapping[str, str] | None = None) -> list[Finding]:
    """What there is to say, the most important first.

    Args:
        run: the facts.
        code: text of the files in them, by name: for the lines to change.
    """
    found = list(_Maker(run, code or {}).all())
    if any(finding.severity != "note" for finding in found):
        found = [finding for finding in found if finding.kind != "server_time"]  # which would contradict them
    return sorted(found, key=lambda finding: _ORDER[finding.severity])


def _whole(run: Run) -> list[Call]:
    return [call for call in run.calls if call.outcome == "completed"]


# ---------------------------------------------------------------------------------------------------------------- findings


class _Maker:
    def __init__(self, run: Run, code: Mapping[str, str]) -> None:
        self.run = run
        self.code = code
        self.whole = _whole(run)
        self.cold = avoidable(run.calls)
        self.begun: dict[int, list[float]] = defaultdict(list)
        self.ends: dict[tuple[int, str], list[float]] = defaultdict(list)
        for call in sorted(run.calls, key=lambda call: call.begin_s):
            self.begun[call.process].append(call.begin_s)
        for call in sorted(run.calls, key=lambda call: call.end_s):
            self.ends[call.process, call.endpoint].append(call.end_s)
        self.clients: dict[tuple[int, int], Client] = {
            (client.process, client.number): client for client in run.clients
        }

    def all(self) -> Iterator[Finding]:
        """Every one of them."""
        if not self.run.calls and not self.run.unfinished:
            return
        told: set[tuple[str, int]] = set()
        for finding in self.remade():
            told.add((finding.where[0].file, finding.where[0].line))
            yield finding
        yield from self.contexts(told)
        yield from self.retries()
        yield from self.abandoned()
        yield from self.failed()
        if len(self.whole) >= ENOUGH:
            lost = list(self.dropped())
            yield from lost
            yield from self.pool()
            if not lost and not told:
                yield from self.handshakes()
            yield from self.lookups()
            yield from self.cpu()
            yield from self.waiting()
            yield from self.server()

    # --- clients and connections ------------------------------------------------------------------------------------

    def many_avoidable(self) -> bool:
        """Connections that need not have been opened are a finding."""
        return len(self.cold) >= 2 and len(self.cold) >= _AVOIDABLE * len(self.run.calls)

    def remade(self) -> Iterator[Finding]:
        """Clients that are made again and again in one place, and whose calls open connections therefore."""
        by_site: dict[tuple[str, int], list[Cold]] = defaultdict(list)
        for cold in self.cold:
            client = self.clients.get((cold.call.process, cold.call.client))
            if cold.why == "client" and client is not None and client.site is not None:
                by_site[client.site.place].append(cold)
        made = _by_place(self.run.clients)
        contexts = _by_place(self.run.contexts)
        for place, colds in by_site.items():
            clients = made[place]
            objects = _objects(clients)
            if objects < _AGAIN:
                continue
            site = clients[0].site
            assert site is not None
            name = site.made or clients[0].cls
            used = {(client.process, client.number) for client in clients}
            calls = [call for call in self.run.calls if (call.process, call.client) in used]
            evidence = [
                (
                    f"{count(objects, 'client')} for {count(len(calls), 'call')}, and "
                    f"{count(sum(call.reused is False for call in calls), 'connection')}."
                ),
                *_saved(colds),
                *self._contexts_cost(contexts.get(place, []), place),
            ]
            yield self._remade(site, name, evidence)

    def _remade(self, site: Site, name: str, evidence: list[str]) -> Finding:
        found = self._construction(site, name)
        once = "at module level" if not site.at_top else "once, before the loop"
        change = f"Make it {once}, and use it for all calls."
        now = instead = ""
        function = _short(site.function)
        if found is not None:
            here, there = ("in the loop", "before it") if site.at_top else (f"in {function}()", "at module level")
            now, instead = f"{found.now}  # {here}", f"{found.shared()}  # {there}"
            if found.needs and not site.at_top:
                change = f"Make it once, where {found.needs[0]} is known, and hand it to {function}()."
                instead = f"{found.shared()}  # where {found.needs[0]} is known"
        where = "" if site.at_top else f" in {function}()"
        return Finding(
            kind="client_per_call",
            severity="high",
            title=f"{name} is made anew for each call{where}",
            evidence=tuple(evidence),
            where=(_where(site),),
            change=change,
            now=now,
            instead=instead,
        )

    def _contexts_cost(self, contexts: Sequence[Context], place: tuple[str, int]) -> Iterator[str]:
        if len(contexts) < _AGAIN:
            return
        spent_s = [one.seconds for one in self.run.roots if one.site is not None and one.site.place == place]
        cost = f", which took {duration(sum(spent_s))} for reading certificates alone" if spent_s else ""
        yield f"{count(len(contexts), 'SSLContext')} with them{cost}."

    def contexts(self, told: set[tuple[str, int]]) -> Iterator[Finding]:
        """TLS contexts that are made again and again, where no client is to blame."""
        for place, contexts in _by_place(self.run.contexts).items():
            site = contexts[0].site
            # As often as calls come between them: what a library makes when it is imported is made once, be it five.
            times = len({self._before(context) for context in contexts})
            if site is None or place in told or times < max(_AGAIN, len(self.run.calls) / 2):
                continue
            spent_s = [one.seconds for one in self.run.roots if one.site is not None and one.site.place == place]
            cost = f" {duration(sum(spent_s))} went into reading certificates." if spent_s else ""
            library = f" by {site.library}" if site.library else ""
            where = "" if site.at_top else f" in {_short(site.function)}()"
            source = self.code.get(site.file)
            yield Finding(
                kind="ssl_context_per_call",
                severity="medium",
                title=f"An SSLContext is made again and again{where}",
                evidence=(
                    f"{count(len(contexts), 'context')}{library} for {count(len(self.run.calls), 'call')}.{cost}",
                ),
                where=(_where(site),),
                change="Make one at module level, and give it to all clients: verify=context. Or share the client.",
                now=(source and shown(source, site.line)) or "",
                instead="context = ssl.create_default_context()",
            )

    def _before(self, context: Context) -> tuple[int, int]:
        """Its process, and how many calls had begun there."""
        return context.process, bisect_right(self.begun[context.process], context.at_s)

    def dropped(self) -> Iterator[Finding]:
        """Connections that one and the same client lost between its calls."""
        if not self.many_avoidable():
            return
        for why in _LOST:
            colds = [cold for cold in self.cold if cold.why == why]
            if len(colds) >= max(2, _AVOIDABLE * len(self.run.calls)):
                yield self._dropped(why, colds)

    def _dropped(self, why: Why, colds: list[Cold]) -> Finding:
        calls = len(self.run.calls)
        number = f"{count(len(colds), 'connection')} of {calls:,} calls"
        client = self._client_of(colds)
        site = client.site if client is not None else None
        name = (site.made or site.library if site is not None else "") or (client.cls if client is not None else "")
        evidence = [f"{number} would not have been needed."]
        now = instead = ""
        severity: Severity = "high" if self._handshake_s(colds) >= _HANDSHAKE_S else "medium"
        if why == "stream":
            title = "Streams lose their connection"
            evidence.append(
                f"{name or 'The client'} stops reading at the last event and closes: the end of the message was not "
                "read, so the connection cannot be used again."
            )
            change = "Give it a client that reads to the end, or call spanwire_instrument.instrument() at the program's start."
            now, instead = self._reading_on(client)
            if not instead:
                change = "Call this at the program's start: streams are then read to their end."
                instead = "spanwire_instrument.instrument()"
        elif why == "idle":
            title = "Connections are closed while the program does something else"
            gaps_s = [cold.call.begin_s - cold.before.end_s for cold in colds]
            library = colds[0].call.transport
            keep_s = math.ceil(max(gaps_s) / 30) * 30
            evidence.append(
                f"{duration(statistics.median(gaps_s))} lay between two calls at the median; {library} keeps idle "
                f"connections for {EXPIRES_S[library]:.0f} s."
            )
            change = f"Keep them for longer than that (if the server does: ask for {keep_s} s)."
            if library == "aiohttp":
                instead = f"aiohttp.TCPConnector(keepalive_timeout={keep_s})"
            else:
                instead = f"{library}.Limits(keepalive_expiry={keep_s})"
        elif why == "left":
            title = "Answers are left before their end, and their connections are lost"
            kinds = Counter(cold.before.outcome.replace("_", " ") for cold in colds)
            evidence.append(", ".join(f"{number} {kind}" for kind, number in kinds.items()) + ".")
            change = "Where the rest of an answer is short, read it; or ask for less (max_tokens, stop)."
            site = next((cold.before.site for cold in colds if cold.before.site is not None), site)
        else:
            title = "The other side closes connections"
            evidence.append("The client read each answer to its end, and the connection was gone for the next call.")
            change = "Look for 'Connection: close' or a short keep-alive at the server, or a proxy before it."
            site = None
        evidence += _saved(colds)
        return Finding(
            kind=_LOST[why],
            severity=severity,
            title=title,
            evidence=tuple(evidence),
            where=() if site is None else (_where(site),),
            change=change,
            now=now,
            instead=instead,
        )

    def _reading_on(self, client: Client | None) -> tuple[str, str]:
        """The line that makes this client, and the same with one of ours in it; empty where none fits."""
        helper = _helper(client)
        site = client.site if client is not None else None
        if client is None or site is None or helper is None:
            return "", ""
        if site.made.rpartition(".")[2] in _CHAT_OPENAI:
            return self._with(site, site.made, None, "spanwire_instrument.chat_openai()")
        if site.made.partition(".")[0] in _SDKS:
            return self._with(site, site.made, "http_client", f"spanwire_instrument.{helper}()")
        found = None if site.made or site.library else self._construction(site, client.cls)
        return ("", "") if found is None else (found.now, found.made_by(f"spanwire_instrument.{helper}"))

    def _client_of(self, colds: Iterable[Cold]) -> Client | None:
        numbers = Counter((cold.call.process, cold.call.client) for cold in colds)
        for key, _ in numbers.most_common():
            if key in self.clients:
                return self.clients[key]
        return None

    @staticmethod
    def _handshake_s(colds: Sequence[Cold]) -> float:
        return statistics.median(cold.call.segment_s("handshake") for cold in colds) if colds else 0.0

    def handshakes(self) -> Iterator[Finding]:
        """They are few, and yet the slowest calls would be faster without them."""
        calls = self.whole
        if len(calls) < _P95_FROM:
            return
        with_s = _p95([call.first_s for call in calls])
        without_s = _p95([max(0.0, call.first_s - call.segment_s("handshake")) for call in calls])
        saved_s = with_s - without_s
        if saved_s < max(_HANDSHAKE * with_s, _HANDSHAKE_S):
            return
        cold = [call for call in calls if call.segment_s("handshake") > 0]
        yield Finding(
            kind="handshake_share",
            severity="medium",
            title=f"Handshakes are {percent(saved_s / with_s)} of the p95 time to the first content",
            evidence=(
                (
                    f"It is {duration(with_s)}, and would be {duration(without_s)} without them. {len(cold):,} of "
                    f"{count(len(calls), 'call')} opened a connection."
                ),
            ),
            where=self._sites(cold),
            change="Open the connection before it is needed: a small request when the program starts.",
        )

    def lookups(self) -> Iterator[Finding]:
        """Names that are looked up although the connection is there, or for each new one."""
        for host in dict.fromkeys(lookup.host for lookup in self.run.lookups):
            calls = [call for call in self.run.calls if _host(call.endpoint) == host]
            found = [lookup for lookup in self.run.lookups if lookup.host == host]
            if len(calls) < ENOUGH or len(found) < 0.5 * len(calls):
                continue
            opened = sum(call.reused is False for call in calls)
            median_s = statistics.median(lookup.seconds for lookup in found)
            because = "one for each new connection" if len(found) <= opened else f"for {opened:,} new connections"
            yield Finding(
                kind="dns_per_call",
                severity="medium" if median_s >= _LOOKUP_S else "note",
                title=f"{host} is looked up again and again",
                evidence=(
                    f"{len(found):,} times for {count(len(calls), 'call')}, {because}; {duration(median_s)} at the median.",
                ),
                where=self._sites(calls),
                change="Connections that are re-used need no look-up: see what is said of them."
                if len(found) <= 2 * opened
                else "Something else asks for that name: the connections do not.",
            )

    def pool(self) -> Iterator[Finding]:
        """Calls that wait for a connection of a client that may have no more."""
        total_s = sum(call.total_s for call in self.whole)
        waits = [call for call in self.whole if self._waited_for_another(call)]
        wait_s = sum(call.segment_s("queue", "local") for call in waits)
        if not total_s or wait_s < max(_POOL * total_s, _NOTICED_S * len(waits)):
            return
        peak = _peak(self.run.calls)
        client = self.clients.get((waits[0].process, waits[0].client))
        site = client.site if client is not None else None
        now = instead = ""
        library = waits[0].transport
        if site is not None and client is not None:
            made, limits = self._limits(site, client, library, peak)
            now, instead = made, limits
        longest_s = max(call.segment_s("queue", "local") for call in waits)
        yield Finding(
            kind="pool_wait",
            severity="high",
            title="Calls wait for a connection on this side",
            evidence=(
                (
                    f"{percent(wait_s / total_s)} of the time: {count(len(waits), 'call')} waited, the longest "
                    f"{duration(longest_s)}."
                ),
                f"Up to {count(peak, 'call')} ran at once.",
            ),
            where=(_where(site),) if site is not None else self._sites(waits),
            change=f"Allow {peak:,} connections, or start fewer calls at once.",
            now=now,
            instead=instead,
        )

    def _waited_for_another(self, call: Call) -> bool:
        """It got its connection when another call gave one back. Else it was the client that took its time: the first call
        of a process may load modules for a tenth of a second."""
        wait_s = call.segment_s("queue", "local")
        ends = self.ends[call.process, call.endpoint]
        first = bisect_left(ends, call.begin_s)
        return wait_s > 0 and first < len(ends) and ends[first] <= call.begin_s + wait_s + min(_NOTICED_S, wait_s)

    def _limits(self, site: Site, client: Client, library: str, peak: int) -> tuple[str, str]:
        if client.cls == "aiohttp.ClientSession":
            return self._with(site, client.cls, "connector", f"aiohttp.TCPConnector(limit={peak})")
        limits = f"{library}.Limits(max_connections={peak})"
        if not site.made and not site.library:  # the user makes the HTTP client
            return self._with(site, client.cls, "limits", limits)
        if site.made.partition(".")[0] not in _SDKS:
            return "", limits
        helper = _helper(client)
        value = f"spanwire_instrument.{helper}(limits={limits})" if helper else f"{client.cls}(limits={limits})"
        return self._with(site, site.made, "http_client", value)

    # --- calls ------------------------------------------------------------------------------------------------------

    def retries(self) -> Iterator[Finding]:
        """Requests that one call of the user's into a library sent again after one that failed."""
        groups: dict[tuple[int, int], list[Call]] = defaultdict(list)
        for call in self.run.calls:
            if call.inside:
                groups[call.process, call.inside].append(call)
        by_site: dict[tuple[str, int] | None, list[tuple[Call, Call]]] = defaultdict(list)
        for calls in groups.values():
            for before, after in pairwise(calls):
                alike = (after.endpoint, after.model) == (before.endpoint, before.model)
                if before.error and alike and after.begin_s >= before.end_s:
                    by_site[None if before.site is None else before.site.place].append((before, after))
        for pairs in by_site.values():
            yield self._retried(pairs)

    def _retried(self, pairs: list[tuple[Call, Call]]) -> Finding:
        """Of one line: each request that failed, and the one that followed it."""
        first = pairs[0][0]
        site, library = first.site, first.site.library if first.site is not None else ""
        calls = len({(before.process, before.inside) for before, _ in pairs})
        errors = Counter(before.error for before, _ in pairs)
        lost_s = sum(after.begin_s - before.begin_s for before, after in pairs)
        client = self.clients.get((first.process, first.client))
        made = client.site if client is not None else None
        now = instead = ""
        if made is not None and library in ("openai", "anthropic") and made.made.startswith(library):
            now, instead = self._with(made, made.made, "max_retries", "0")
        return Finding(
            kind="hidden_retries",
            severity="medium",
            title=f"{library or 'A library'} sends requests again, and does not say so",
            evidence=(
                f"{count(len(pairs), 'request')} more than the program asked for, in {count(calls, 'call')}: after "
                + ", ".join(f"{number} {name}" for name, number in errors.items())
                + ".",
                f"{duration(lost_s)} went into attempts that failed, and into the pauses after them.",
            ),
            where=() if site is None else (_where(site),),
            change="See to the cause (a limit of rate, a server that is overloaded). To see each failure, switch retries "
            "off and make them yourself.",
            now=now,
            instead=instead,
        )

    def abandoned(self) -> Iterator[Finding]:
        """Streams that nobody closed."""
        by_site: dict[tuple[str, int] | None, list[Call]] = defaultdict(list)
        for call in self.run.calls:
            if call.outcome == "abandoned":
                by_site[None if call.site is None else call.site.place].append(call)
        for calls in by_site.values():
            site = calls[0].site
            source = self.code.get(site.file) if site is not None else None
            lines = with_statement(source, site.line) if source and site is not None else None
            yield Finding(
                kind="abandoned_streams",
                severity="medium",
                title="Streams are dropped without being closed",
                evidence=(
                    (
                        f"{len(calls):,} of {count(len(self.run.calls), 'call')}: until the garbage collector comes, the "
                        "server goes on, and the connection is taken."
                    ),
                ),
                where=() if site is None else (_where(site),),
                change="Close it on every way out.",
                now=lines[0] if lines else "",
                instead=lines[1] if lines else "",
            )

    def failed(self) -> Iterator[Finding]:
        """What went wrong: to know, since such a call says little of where time goes."""
        errors = Counter(call.error for call in self.run.calls if call.error)
        if errors:
            kinds = ", ".join(f"{number} {name}" for name, number in errors.most_common(4))
            yield Finding(
                kind="failed_calls",
                severity="note",
                title=f"{sum(errors.values()):,} of {count(len(self.run.calls), 'request')} failed",
                evidence=(f"{kinds}.",),
            )
        if self.run.unfinished:
            sites = [site for site in self.run.unfinished if site is not None]
            number = len(self.run.unfinished)
            yield Finding(
                kind="unfinished_calls",
                severity="note",
                title=f"{count(number, 'call')} {'was' if number == 1 else 'were'} under way when the program ended",
                evidence=("Nothing is known of where their time went.",),
                where=tuple(dict.fromkeys(_where(site) for site in sites))[:3],
            )

    def cpu(self) -> Iterator[Finding]:
        """CPU time of the process over streams during which no other call ran."""
        spent = [
            call.cpu_s / call.tokens
            for call in self.whole
            if call.cpu_s is not None and call.streamed and call.tokens and call.tokens >= _TOKENS
        ]
        if len(spent) < ENOUGH:
            return
        median_s = statistics.median(spent)
        if median_s < _CPU_PER_TOKEN_S:
            return
        yield Finding(
            kind="client_cpu",
            severity="medium",
            title=f"{duration(median_s)} of CPU time for each token",
            evidence=(
                (
                    f"The process as a whole, at the median of {count(len(spent), 'stream')} during which no other call ran: "
                    f"a core is full at {1 / median_s:,.0f} tokens a second."
                ),
            ),
            where=self._sites(self.whole),
            change="Do less for each token: gather some before you show, parse or store them. A profiler says where.",
        )

    def waiting(self) -> Iterator[Finding]:
        """Answers that were there and not fetched."""
        total_s = sum(call.total_s for call in self.whole)
        waited = [call for call in self.whole if call.segment_s("client", "waiting") > 0]
        wait_s = sum(call.segment_s("client", "waiting") for call in waited)
        if not total_s or wait_s < max(_WAITING * total_s, _NOTICED_S * len(waited)):
            return
        yield Finding(
            kind="slow_consumer",
            severity="medium",
            title="Answers wait for the program",
            evidence=(
                (
                    f"{percent(wait_s / total_s)} of the time the next piece was there and nobody fetched it "
                    f"({count(len(waited), 'call')})."
                ),
            ),
            where=self._sites(waited),
            change="What is done for each piece takes longer than the piece: do it after the stream, or in another thread.",
        )

    def server(self) -> Iterator[Finding]:
        """The time is the server's: then the client is not what to work on."""
        total_s = sum(call.total_s for call in self.whole)
        if not total_s:
            return
        queue_s = sum(call.segment_s("queue", "server") for call in self.whole)
        model_s = sum(call.segment_s("model") for call in self.whole)
        if queue_s >= _SERVER_QUEUE * total_s:
            yield Finding(
                kind="server_queue",
                severity="note",
                title=f"{percent(queue_s / total_s)} of the time is spent in the server's queue",
                evidence=("No change of this program makes that shorter: the server needs more room, or fewer calls.",),
            )
        elif queue_s + model_s >= _SERVER * total_s:
            yield Finding(
                kind="server_time",
                severity="note",
                title=f"{percent((queue_s + model_s) / total_s)} of the time is the server's",
                evidence=("Little is left for this program to save.",),
            )

    # --- lines ------------------------------------------------------------------------------------------------------

    def _construction(self, site: Site | None, name: str) -> Construction | None:
        source = self.code.get(site.file) if site is not None else None
        if site is None or not source:
            return None
        return construction(source, site.line, name.rpartition(".")[2])

    def _with(self, site: Site | None, name: str, argument: str | None, value: str) -> tuple[str, str]:
        found = self._construction(site, name)
        return ("", "") if found is None else (found.now, found.with_argument(argument, value))

    @staticmethod
    def _sites(calls: Iterable[Call]) -> tuple[Where, ...]:
        sites = Counter(_where(call.site) for call in calls if call.site is not None)
        return tuple(site for site, _ in sites.most_common(1))


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _where(site: Site) -> Where:
    return Where(site.file, site.line, site.function)


def _short(function: str) -> str:
    return function.rpartition("<locals>.")[2]


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].lower() or endpoint.lower()


Made = TypeVar("Made", Client, Context)


def _by_place(some: Iterable[Made]) -> dict[tuple[str, int], list[Made]]:
    found: dict[tuple[str, int], list[Made]] = defaultdict(list)
    for one in some:
        if one.site is not None:
            found[one.site.place].append(one)
    return found


def _objects(clients: Iterable[Client]) -> int:
    """An SDK's object may hold two HTTP clients, made in one call."""
    return len({(client.process, client.inside or -client.number) for client in clients})


def _saved(colds: Sequence[Cold]) -> Iterator[str]:
    """What the handshakes took, of what their callers waited for."""
    handshakes = [cold.call.segment_s("handshake") for cold in colds]
    first_s = statistics.median(cold.call.first_s for cold in colds)
    median_s = statistics.median(handshakes)
    if median_s > 0 and first_s > 0:
        yield (
            f"The handshake took {duration(median_s)} of {duration(first_s)} to the first content "
            f"({percent(min(1.0, median_s / first_s))}), at the median of those."
        )


def _peak(calls: Iterable[Call]) -> int:
    """The most calls of one process to one endpoint at once."""
    groups: dict[tuple[int, str], list[tuple[float, int]]] = defaultdict(list)
    for call in calls:
        groups[call.process, call.endpoint] += [(call.begin_s, 1), (call.end_s, -1)]
    peak = 0
    for group in groups.values():
        running = 0
        for _, step in sorted(group):
            running += step
            peak = max(peak, running)
    return peak


def _helper(client: Client | None) -> str | None:
    """Of ours, what makes such an HTTP client."""
    names = {
        "httpx.Client": "httpx_client",
        "httpx.AsyncClient": "httpx_async_client",
        "httpx2.Client": "httpx2_client",
        "httpx2.AsyncClient": "httpx2_async_client",
    }
    return names.get(client.cls) if client is not None else None
