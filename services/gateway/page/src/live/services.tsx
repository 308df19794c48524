/** The services with their health. */

import { age, counted } from "../format.ts";
import type { LiveSnapshot, ServiceShown } from "../types.ts";

const SIGNS = { ready: "●", starting: "◐", draining: "◑", down: "✕" } as const;

export function Services({ snapshot }: { snapshot: LiveSnapshot }) {
  const services = snapshot.services?.length ? snapshot.services : derived(snapshot);
  return (
    <section class="card services-card" aria-labelledby="services-title">
      <h2 id="services-title">Services</h2>
      <ul class="services">
        {services.map((service) => (
          <li key={`${service.kind} ${service.name}`} class={`state-${service.state}`}>
            <span aria-hidden="true" class="sign">
              {SIGNS[service.state]}
            </span>
            <strong>{service.name || service.kind}</strong>
            <span>{service.state}</span>
            <span class="muted num">
              {service.up_s !== null && `up ${age(service.up_s)}`}
              {service.num_restarts !== null && service.num_restarts > 0 && (
                <strong>, {counted(service.num_restarts, "restart")}</strong>
              )}
            </span>
          </li>
        ))}
      </ul>
    </section>
  );
}

/** What a snapshot tells of services if the gateway lists none. */
function derived({ gateway, scheduler }: LiveSnapshot): ServiceShown[] {
  const one = (kind: ServiceShown["kind"], name: string, state: ServiceShown["state"]): ServiceShown => ({
    kind,
    name,
    state,
    num_restarts: null,
    up_s: null,
  });
  const services = [
    one("gateway", "gateway", gateway.draining ? "draining" : "ready"),
    one("scheduler", "scheduler", scheduler ? "ready" : "down"),
  ];
  if (!scheduler) return services;
  services.push(one("cache", "cache", scheduler.cache_connected ? "ready" : "down"));
  for (const worker of scheduler.workers) {
    services.push(one("worker", worker.name || `worker ${worker.worker}`, worker.draining ? "draining" : "ready"));
  }
  return services;
}
