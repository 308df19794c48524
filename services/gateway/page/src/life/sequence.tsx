/** One sequence of a request: bars over time, reasons, and what was found in the cache. */

import { count, counted, seconds, share } from "../format.ts";
import { requestHref } from "../shell/route.ts";
import type { MissReason, PrefixShown, SequenceTimeline, TimelineSpan } from "../types.ts";
import { reasonClass } from "./reasons.ts";
import { hasEnded, lastS, phases, totals, waits } from "./timeline.ts";

const MISSES: Record<MissReason, [string, string]> = {
  new: ["new to the cache", "--c-grey"],
  block_border: ["in the block of the last token", "--c-yellow"],
  evicted: ["was cached, and evicted", "--c-vermilion"],
  other_worker: ["cached on another worker", "--c-orange"],
  in_flight: ["being computed for another request", "--c-purple"],
  whole_prompt: ["part of a prompt that must be computed in full", "--c-green"],
};

/** What a reason means, and its colour; a newer server may have further reasons. */
function missOf(reason: string): [string, string] {
  return MISSES[reason as MissReason] ?? [reason, "--c-grey"];
}

export function Sequence({ sequence, nowS }: { sequence: SequenceTimeline; nowS: number | null }) {
  const { spans, prefix, request_id: id } = sequence;
  const ended = hasEnded(spans);
  const endS = ended ? lastS(spans) : Math.max(lastS(spans), nowS ?? 0);
  const bars = phases(spans, endS);
  const sum = totals(bars);
  const why = waits(spans);
  const place = (fromS: number, toS: number) => ({
    left: `${(100 * fromS) / (endS || 1)}%`,
    width: `${(100 * (toS - fromS)) / (endS || 1)}%`,
  });
  return (
    <section class="card life" aria-label={`Sequence ${id}`}>
      <div class="row spread">
        <h3 class="mono">{id}</h3>
        <span class={`tag ${ended ? "ended" : reasonClass(bars.at(-1)?.reason ?? "waiting")}`}>
          {ended ? `ended: ${spans.at(-1)?.detail ?? ""}` : (bars.at(-1)?.reason ?? "waiting")}
        </span>
      </div>
      <p class="num life-sum">
        <span>
          total <strong>{seconds(endS)}</strong>
        </span>
        <span>
          waited <strong>{seconds(sum.waits)}</strong>
        </span>
        <span>
          ran <strong>{seconds(sum.runs)}</strong>
        </span>
        {sum.back > 0 && (
          <span>
            preempted or requeued <strong>{seconds(sum.back)}</strong>
          </span>
        )}
      </p>
      <div class="life-bars" aria-hidden="true">
        {bars.map((bar) => (
          <i
            key={bar.fromS}
            class={bar.kind}
            style={place(bar.fromS, bar.toS)}
            title={`${bar.reason}: ${seconds(bar.toS - bar.fromS)}`}
          >
            {bar.reason}
          </i>
        ))}
      </div>
      {why.length > 0 && (
        <div class="life-bars thin" aria-hidden="true">
          {why.map((span) => (
            <i
              key={`${span.reason} ${span.from_s} ${span.worker}`}
              class={reasonClass(span.reason)}
              style={place(span.from_s, span.to_s)}
              title={`${span.reason}: ${span.detail}`}
            >
              {span.reason}
            </i>
          ))}
        </div>
      )}
      <p class="life-axis muted num" aria-hidden="true">
        <span>0 s</span>
        <span>{seconds(endS / 2)}</span>
        <span>{seconds(endS)}</span>
      </p>
      {prefix && <Prefix prefix={prefix} />}
      <Spans spans={spans} />
    </section>
  );
}

function Prefix({ prefix }: { prefix: PrefixShown }) {
  const { prompt_tokens: all, cached_tokens: cached, missed } = prefix;
  return (
    <div class="prefix">
      <p>
        Of {counted(all, "prompt token")}, <strong>{count(cached)}</strong> came from the cache ({share(cached, all)}).
        {missed.length > 0 && " The others missed because:"}
      </p>
      <span class="bar tall" aria-hidden="true">
        <i style={{ width: `${all ? (100 * cached) / all : 0}%`, background: "var(--c-sky)" }} />
        {missed.map((miss) => (
          <i
            key={miss.reason}
            style={{ width: `${all ? (100 * miss.num_tokens) / all : 0}%`, background: `var(${missOf(miss.reason)[1]})` }}
          />
        ))}
      </span>
      <ul class="misses num">
        {missed.map((miss) => (
          <li key={miss.reason}>
            <i style={{ background: `var(${missOf(miss.reason)[1]})` }} aria-hidden="true" />
            <strong>{count(miss.num_tokens)}</strong> {missOf(miss.reason)[0]}
            {miss.detail && <span class="muted"> ({miss.detail})</span>}
          </li>
        ))}
      </ul>
    </div>
  );
}

function Spans({ spans }: { spans: TimelineSpan[] }) {
  return (
    <div class="scroll-x">
      <table class="num spans">
        <thead>
          <tr>
            <th scope="col" class="num">
              From
            </th>
            <th scope="col" class="num">
              For
            </th>
            <th scope="col">Reason</th>
            <th scope="col">Detail</th>
            <th scope="col" class="num">
              Worker
            </th>
          </tr>
        </thead>
        <tbody>
          {spans.map((span, index) => (
            <tr key={index}>
              <td class="num">{seconds(span.from_s)}</td>
              <td class="num">{span.to_s > span.from_s ? seconds(span.to_s - span.from_s) : ""}</td>
              <td>
                <span class={`tag ${reasonClass(span.reason)}`}>{span.reason}</span>
              </td>
              <td title={`decisions ${span.first_decision} to ${span.last_decision}`}>
                {span.behind ? <Behind span={span} behind={span.behind} /> : span.detail}
              </td>
              <td class="num">{span.worker ?? ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** The detail of a span. The id of the request ahead in the queue is a link. */
function Behind({ span, behind }: { span: TimelineSpan; behind: string }) {
  const at = span.detail.indexOf(behind);
  const link = (
    <a class="mono" href={requestHref(behind)}>
      {behind}
    </a>
  );
  if (at < 0) return <>{span.detail} (behind {link})</>;
  return (
    <>
      {span.detail.slice(0, at)}
      {link}
      {span.detail.slice(at + behind.length)}
    </>
  );
}
