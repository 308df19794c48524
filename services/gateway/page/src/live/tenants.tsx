/** Each tenant's running and waiting tokens, and its share of the running tokens of all tenants in the table. */

import { count, share, tenantName } from "../format.ts";
import type { SchedulerView } from "../types.ts";

export function Tenants({ view }: { view: SchedulerView }) {
  const running = view.tenants.reduce((sum, tenant) => sum + tenant.running_tokens, 0);
  const most = Math.max(1, ...view.tenants.map((tenant) => tenant.running_tokens + tenant.waiting_tokens));
  return (
    <section class="card" aria-labelledby="tenants-title">
      <div class="row spread">
        <h2 id="tenants-title">Tenants</h2>
        <p class="legend">
          <span>
            <i style={{ background: "var(--c-green)" }} />
            running
          </span>
          <span>
            <i style={{ background: "var(--c-orange)" }} />
            waiting
          </span>
        </p>
      </div>
      {!view.tenants.length && <p class="muted">No tenant has live requests.</p>}
      {view.tenants.length > 0 && (
        <div class="scroll-x">
          <table class="num">
            <thead>
              <tr>
                <th scope="col">Tenant</th>
                <th scope="col">Tokens</th>
                <th scope="col" class="num">
                  Running
                </th>
                <th scope="col" class="num">
                  Waiting
                </th>
                <th scope="col" class="num">
                  Share
                </th>
              </tr>
            </thead>
            <tbody>
              {view.tenants.map((tenant) => (
                <tr key={tenant.tenant}>
                  <th scope="row">{tenantName(tenant.tenant)}</th>
                  <td class="wide">
                    <span class="bar" aria-hidden="true">
                      <i style={{ width: `${(100 * tenant.running_tokens) / most}%`, background: "var(--c-green)" }} />
                      <i style={{ width: `${(100 * tenant.waiting_tokens) / most}%`, background: "var(--c-orange)" }} />
                    </span>
                  </td>
                  <td class="num">{count(tenant.running_tokens)}</td>
                  <td class="num">{count(tenant.waiting_tokens)}</td>
                  <td class="num">{share(tenant.running_tokens, running)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {view.num_tenants > view.tenants.length && (
        <p class="muted">The largest {view.tenants.length} of {count(view.num_tenants)} are shown.</p>
      )}
    </section>
  );
}
