/** Recent requests, each with a link to its timeline. */

import { age, count, shortId, tenantName } from "../format.ts";
import { moveFocus } from "../shell/focus.ts";
import { requestHref } from "../shell/route.ts";
import type { SchedulerView, SequenceShown } from "../types.ts";
import { reasonClass } from "../life/reasons.ts";

export function Requests({ view, most = 32 }: { view: SchedulerView; most?: number }) {
  const newest = [...view.sequences].sort((a, b) => b.arrived_s - a.arrived_s).slice(0, most);
  const withTenants = newest.some((one) => one.tenant);
  return (
    <section class="card" aria-labelledby="requests-title">
      <div class="row spread">
        <h2 id="requests-title">Requests</h2>
        <p class="muted num">
          {count(view.num_live_sequences)} live, {count(view.num_finished)} finished, {count(view.num_rejected)} refused
        </p>
      </div>
      {!newest.length && <p class="muted">No request has been accepted yet.</p>}
      <ul class="requests" onKeyDown={moveFocus("a")}>
        {newest.map((one) => (
          <li key={`${one.request_id} ${one.arrived_s}`}>
            <a href={requestHref(one.answer_id || one.request_id)} title={one.request_id}>
              <span class="mono">{shortId(one.request_id)}</span>
            </a>
            <span class={`tag ${reasonClass(one.reason)}`}>{one.reason}</span>
            <span class="muted num request-age">{said(one, view.at_s)}</span>
            {withTenants && <span class="muted">{tenantName(one.tenant)}</span>}
            <span class="request-detail muted" title={one.detail}>
              {one.detail}
            </span>
          </li>
        ))}
      </ul>
    </section>
  );
}

function said(one: SequenceShown, nowS: number): string {
  return one.reason === "ended" ? `${age(nowS - one.since_s)} ago` : `for ${age(nowS - one.since_s)}`;
}
