"""A job server for the loopback server: submits, a queue, work that takes its time, webhooks with everything that goes wrong.

It speaks as the servers of all dialects do; the end of the path decides which (see ``loopback_shapes``). Scripts say
what is answered and how long that takes, options what befalls jobs and webhooks
(:class:`~spanwire_webhook.loopback_rules.Rules`)::

    part = WebhookPart(lose=0.05, duplicate=0.05)
    with LoopbackServer([Script.say("Hello", queue_s=0.1, prefill_s=0.2)], part=part) as server:
        ...
        assert part.jobs[0].taken == 1

Of a script it plays ``queue_s`` (in the queue), ``headers_s`` + ``prefill_s`` + the gaps (at work), ``end_s`` (from the
end to the webhook), the answer, ``finish_reason="error"`` (the job fails), ``body`` (JSON: the output), and an error
``status`` (the submit is refused). ``drop_after="request"``: the job is taken, and the connection cut;
``hang_after="request"``: taken, and never answered. OpenAI's batches: see :mod:`spanwire_webhook.loopback_batches`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl as tls
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from spanwire.testing.loopback import Book, Request
from spanwire.testing.script import Script

from .loopback_batches import Batches
from .loopback_http import Answer, Cut, Listener, error_body, listen
from .loopback_record import Delivery, Job, Record
from .loopback_rules import SECRET, Rules
from .loopback_send import Sender, sign_baseten, sign_standard
from .loopback_shapes import SHAPES, BadSubmit, Route, Shape, route

__all__ = ["PART", "SECRET", "Delivery", "Job", "WebhookPart"]

#: How long an acknowledgement waits for the webhooks that shall come before it: their receiver may wait for it, too.
_EARLY_S = 5.0
#: By how much a webhook is held back that later ones shall overtake.
_OVERTAKEN_S = 0.2
_NOBODYS = "whsec_" + "bm90IHRoZSBzZWNyZXQgb2YgYW55Ym9keQ=="


class WebhookPart:
    """See :class:`spanwire.testing.loopback.LoopbackPart`. The options are those of ``Rules``.

    A part keeps the record of the server that it was started for last.

    Raises:
        ConfigurationError: a bad option.
    """

    name = "webhook"
    alpn = ("http/1.1",)
    #: Of an endpoint that is to try it out: a store of its own, and a receiver in the same process.
    endpoint_options: Mapping[str, Any] = {
        "store": "sqlite://",
        "receiver": "127.0.0.1:0",
        "receiver_options": {"secrets": {"generic": (SECRET,)}},
    }

    def __init__(self, **options: Any) -> None:
        self._rules = Rules.of(options)
        self._record: Record | None = None
        self._yard: _Yard | None = None

    def configured(self, options: Mapping[str, Any]) -> WebhookPart:
        """A part with these options instead."""
        return WebhookPart(**options)

    def change(self, **options: Any) -> None:
        """Other options from now on, for jobs that come later. ``senders``, ``ca``, ``timeout_s``, ``workers``, ``keep`` and
        ``log`` stay as they were when the server was started. From any thread.

        Raises:
            ConfigurationError: a bad option.
        """
        now = {name: getattr(self._rules, name) for name in Rules.__struct_fields__}
        self._rules = Rules.of({**now, **options})
        if self._yard is not None:
            self._yard.rules = self._rules

    @property
    def jobs(self) -> list[Job]:
        """The jobs, in the order in which they came. The list is a copy; its items go on to change."""
        record = self._record
        if record is None:
            return []
        with record.changed:
            return list(record.jobs.values())

    @property
    def deliveries(self) -> list[Delivery]:
        """All attempts to deliver webhooks of these jobs, in the order in which they were made."""
        record = self._record
        if record is None:
            return []
        with record.changed:
            found = [delivery for job in record.jobs.values() for delivery in job.deliveries]
        return sorted(found, key=lambda delivery: delivery.at_s)

    @property
    def files(self) -> dict[str, bytes]:
        """What is in the files that were uploaded, or written by batches, by their ids."""
        yard = self._yard
        return {} if yard is None else {id_: file.content for id_, file in list(yard.batches.files.items())}

    @property
    def counts(self) -> dict[str, int]:
        """How many ``jobs``, ``repeated_submits``, ``ended``, ``deliveries``, ``taken`` (with 2xx), and so on. As
        ``GET /loopback/counts`` tells it to other processes, with ``open``: jobs that are not done, webhooks included."""
        record, yard = self._record, self._yard
        if record is None:
            return {}
        with record.changed:
            return {**record.counts, "open": 0 if yard is None else yard.open}

    async def start(self, book: Book, *, host: str, port: int, uds: str | None, ssl: tls.SSLContext | None) -> Listener:
        record = Record(book.changed, keep=self._rules.keep, log=self._rules.log)
        yard = _Yard(book, record, self._rules, self)
        try:
            listener = await listen(book, yard.handle, yard.aclose, host=host, port=port, uds=uds, ssl=ssl)
        except BaseException:
            record.close()
            raise
        self._record, self._yard = record, yard
        return listener

    @staticmethod
    def url(host: str, port: int, *, secure: bool) -> str:
        return f"{'https' if secure else 'http'}://{host}{f':{port}' if port else ''}/v1"


class _Yard:
    """One server that runs: takes jobs, works on them, sends their webhooks."""

    def __init__(self, book: Book, record: Record, rules: Rules, part: WebhookPart) -> None:
        self.rules = rules
        self.open = 0
        self.batches = Batches(book)
        self._book = book
        self._record = record
        self._part = part
        self._workers = None if rules.workers is None else asyncio.Semaphore(rules.workers)
        self._sender = Sender(at_once=rules.senders, timeout_s=rules.timeout_s, ca=rules.ca)
        self._tasks: dict[asyncio.Task[None], Job] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._number = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Answer | Cut:
        """For the HTTP server."""
        if request.method == "GET" and request.path == "/loopback/counts":
            return Answer(200, msgspec.json.encode(self._part.counts))
        key = self.rules.api_key
        denied = key is not None and request.headers.get("authorization") not in {f"Bearer {key}", f"Api-Key {key}"}
        found = self.batches.route(request.method, request.path) or route(request.method, request.path)
        if found is None:
            answer = None if denied else self.batches.answer(request, self.rules)
            return answer or _error(404, f"there is nothing at {request.method} {request.path}")
        if denied:
            return _error(401, "the key is missing, or it is another one")
        if found.action == "submit":
            return await self._submit(request, found)
        job = self._record.find(found.shape.name, found.id or "")
        if job is None or self._is_over(job):
            return _error(404, "there is no such job")
        # Cog's share Replicate's paths.
        shape = self.batches if self.batches.has(job) else SHAPES[job.dialect]
        if found.action == "cancel":
            return self._cancel(job, shape)
        with self._record.changed:
            job.asked += 1
        return Answer(200, msgspec.json.encode(shape.told(job)))

    def _is_over(self, job: Job) -> bool:
        return job.finished_s is not None and time.time() - job.finished_s > self.rules.retention_s

    async def _submit(self, request: Request, found: Route) -> Answer | Cut:
        shape = found.shape
        try:
            submit = shape.submit(request.body, request.headers, found.id)
        except BadSubmit as error:
            return _error(error.status, str(error))
        known = self._record.of_client(shape.name, submit.own)
        if known is not None:
            self._record.again(known)
            return Answer(shape.accepted, msgspec.json.encode(shape.acknowledged(known)))
        inner = Request(  # what scripts look at: the call, without what the provider puts around it
            method=request.method,
            path=request.path,
            query=request.query,
            headers=request.headers,
            raw=msgspec.json.encode(submit.call),
            connection=request.connection,
        )
        try:
            script = self._book.script_for(inner, submit.model)
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self._book.fault(f"the script for {request.path} failed: {error!r}")
            return _error(500, f"the script failed: {error!r}")
        if script.status >= 300:
            body = script.body if script.body is not None else error_body(script.status, "as scripted")
            return Answer(script.status, body, {name.lower(): value for name, value in script.headers.items()})
        self._number += 1
        job = Job(
            number=self._number,
            id=shape.new_id(self._number, submit),
            own=submit.own,
            dialect=shape.name,
            model=submit.model,
            operation=submit.operation,
            call=submit.call,
            callback=submit.callback or (self.rules.webhook_url if shape.name == "openai" else None),
            base=f"http://{request.headers.get('host', 'localhost')}{request.path}",
            headers={name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers},
            faults=self.rules.faults(self._number),
            accepted_s=time.time(),
        )
        acknowledgement = msgspec.json.encode(shape.acknowledged(job))
        with self._record.changed:
            self.open += 1
        self._record.add(job)
        life = self._spawn(self._life(job, shape, script), job)
        self._lives[job.number] = life
        return await self._acknowledge(job, script, Answer(shape.accepted, acknowledgement), life)

    async def _acknowledge(self, job: Job, script: Script, answer: Answer, life: asyncio.Task[None]) -> Answer | Cut:
        if "early" in job.faults:
            await asyncio.wait([life], timeout=_EARLY_S)
        if script.hang_after == "request":
            await asyncio.get_running_loop().create_future()
        if script.drop_after == "request":
            return Cut(reset=script.drop_mode == "reset")
        if "mute" in job.faults:
            return Cut()
        if "swallow" in job.faults:
            return _error(504, "the upstream did not answer in time")
        return answer

    def _cancel(self, job: Job, shape: Shape) -> Answer:
        now = job.state in shape.cancels
        if now:
            life = self._lives.get(job.number)
            if life is not None:
                life.cancel()  # its `finally` counts it; what follows is a new task
            job.state, job.finished_s = "cancelled", time.time()
            if shape is self.batches:
                self.batches.end(job, "cancelled")
            self._record.state(job)
            if shape.tells_cancelled:
                with self._record.changed:
                    self.open += 1
                self._spawn(self._tell_end(job, shape), job)
            else:
                self._record.webhook(job, "CANCELED")
        return Answer(200, msgspec.json.encode(shape.cancelled(job, now=now)))

    # --- a job ------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None], job: Job) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = job
        task.add_done_callback(self._gone)
        return task

    def _gone(self, task: asyncio.Task[None]) -> None:
        job = self._tasks.pop(task)
        if self._lives.get(job.number) is task:
            del self._lives[job.number]
        with self._record.changed:
            self.open -= 1
            self._record.changed.notify_all()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._book.fault(f"job {job.id}: the loopback server failed: {error!r}")

    async def _life(self, job: Job, shape: Shape, script: Script) -> None:
        if script.queue_s:
            await asyncio.sleep(script.queue_s)
        starts = shape.starts and job.callback is not None and self.rules.start_events
        held = starts and "reorder" in job.faults
        tried = asyncio.Event()
        async with contextlib.AsyncExitStack() as worker:
            if self._workers is not None:
                await worker.enter_async_context(self._workers)
            job.state, job.started_s = "running", time.time()
            self._record.state(job)
            if starts and not held:
                with self._record.changed:
                    self.open += 1
                self._spawn(self._tell_start(job, shape, tried), job)
            else:
                tried.set()
            await self._work(job, shape, script)
        self._lives.pop(job.number, None)  # from here on it cannot be cancelled
        if script.end_s:
            await asyncio.sleep(script.end_s)
        if "reorder" in job.faults and not held:
            await asyncio.sleep(_OVERTAKEN_S)
        await tried.wait()  # in order, unless the first try fails
        await self._tell_end(job, shape)
        if held:
            await self._tell_start(job, shape, tried)

    async def _work(self, job: Job, shape: Shape, script: Script) -> None:
        busy_s = script.headers_s + script.prefill_s + script.decode_s
        if busy_s:
            await asyncio.sleep(busy_s)
        if shape is self.batches:
            await self.batches.work(job, script, self.rules.batch_window_s)
            self._record.state(job)
            return
        if script.finish == "error":
            job.error = ("server_error", "the script says that it fails")
        else:
            job.output = shape.output(job, script)
        job.finished_s = time.time()
        job.state = "succeeded" if job.error is None else "failed"
        self._record.state(job)

    # --- webhooks ---------------------------------------------------------------------------------------------------

    async def _tell_start(self, job: Job, shape: Shape, tried: asyncio.Event) -> None:
        try:
            await self._deliver(job, shape, "start", shape.event(job, start=True, thin=False), tried=tried)
        finally:
            tried.set()

    async def _tell_end(self, job: Job, shape: Shape) -> None:
        if job.callback is None:
            self._record.webhook(job, "NONE")
            return
        if "lose" in job.faults:
            self._record.webhook(job, "LOST")
            return
        body = b"" if "blank" in job.faults else shape.event(job, start=False, thin=self.rules.thin)
        taken = await self._deliver(job, shape, "end", body)
        self._record.webhook(job, "SUCCEEDED" if taken else "FAILED")
        if "duplicate" in job.faults:
            await self._deliver(job, shape, "end", body, more=("duplicate",))
        if "renumber" in job.faults:
            await self._deliver(job, shape, "end", body, more=("renumber",))

    async def _deliver(
        self,
        job: Job,
        shape: Shape,
        kind: str,
        body: bytes,
        *,
        more: tuple[str, ...] = (),
        tried: asyncio.Event | None = None,
    ) -> bool:
        """One webhook, with as many attempts as the provider makes. Returns whether it was taken; ``tried`` is set after the
        first attempt."""
        rules = self.rules
        assert job.callback is not None
        webhook_id = f"msg_{job.number:08x}_{kind}{'_again' if 'renumber' in more else ''}"
        faults = (
            *more,
            *(name for name in ("wrong", "blank") if name in job.faults and (kind == "end" or name == "wrong")),
        )
        secrets = (_NOBODYS,) if "wrong" in job.faults else rules.secrets
        seed = None if "wrong" in job.faults else rules.seed_v1a
        for attempt, wait_s in enumerate((0.0, *shape.schedule), start=1):
            if wait_s:
                await asyncio.sleep(wait_s / rules.speed)
            now_s = time.time()
            headers = dict(job.headers) if shape.name == "cog" else {}
            if shape.signs == "standard":
                headers |= sign_standard(secrets, webhook_id, int(now_s), body, seed_v1a=seed)
            elif shape.signs == "baseten":
                headers |= sign_baseten(secrets, job.id, body)
            delivery = Delivery(
                job=job.id, kind=kind, webhook_id=webhook_id, attempt=attempt, at_s=now_s, faults=faults
            )
            try:
                delivery.status = await self._sender.post(job.callback, headers, body)
            except OSError as error:
                delivery.error = f"{type(error).__name__}: {error}"
            self._record.delivered(job, delivery)
            if tried is not None:
                tried.set()
            if delivery.taken:
                return True
            if delivery.status is not None and shape.again is not None and delivery.status not in shape.again:
                return False
        return False

    # --- the end ----------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sender.aclose()
        self._record.close()


def _error(status: int, words: str) -> Answer:
    return Answer(status, error_body(status, words))


PART = WebhookPart()
