// The state of the page as a link: the page's name and its parameters.

import { percentDecoded, percentEncoded } from "./percent";
import { isGiven } from "./transport";

export interface Route {
  page: string;
  params: Record<string, string>;
}

export function parseRoute(text: string): Route {
  const [page = "", query = ""] = text.replace(/^#?\/?/, "").split("?", 2);
  const pairs = query.split("&").filter((pair) => pair !== "");
  return {
    page,
    params: Object.fromEntries(
      pairs.map((pair) => {
        const [name = "", ...value] = pair.split("=");
        return [percentDecoded(name), percentDecoded(value.join("="))];
      }),
    ),
  };
}

type Params = Record<string, string | undefined>;

/**
 * The parameters with which one comes to a page: those that all pages share, those that are given, and those that the
 * page had when it was left.
 *
 * @param left the parameters of the page when it was left, if one was there before
 * @param shared the parameters that all pages share, as they are now
 * @param bound parameter of the page -> the shared parameters that it depends on: a part of a tensor depends on the name
 */
export function arrival(left: Params | undefined, shared: Params, given: Params, bound: Record<string, readonly string[]>): Params {
  const next = { ...shared, ...given };
  const holds = (name: string) => (bound[name] ?? []).every((other) => left?.[other] === next[other]);
  const own = Object.entries(left ?? {}).filter(([name]) => !SHARED.includes(name) && holds(name));
  return { ...next, ...Object.fromEntries(own), ...next }; // what pages share stands first
}

/** The parameters of a page that go along to another page. */
export function sharedOf(params: Record<string, string>): Record<string, string> {
  return Object.fromEntries(Object.entries(params).filter(([name]) => SHARED.includes(name)));
}

const SHARED = ["state", "step", "with", "side", "name"];

export function formatRoute({ page, params }: Route): string {
  const given = Object.entries(params).filter(([name, value]) => isGiven(name, value));
  const query = given.map(([name, value]) => `${percentEncoded(name)}=${percentEncoded(value)}`).join("&");
  return `#/${page}${query && `?${query}`}`;
}

/** Where routes are kept: in the address of a web page, or in a variable of a widget. */
export interface RouteStore {
  read(): Route;
  /** Shows a route. A replaced one does not come back with the browser's "back". */
  write(route: Route, replace?: boolean): void;
  listen(changed: () => void): () => void;
}

export class AddressRoutes implements RouteStore {
  private readonly listeners = new Set<() => void>();

  read(): Route {
    return parseRoute(location.hash);
  }

  write(route: Route, replace = false): void {
    const address = formatRoute(route);
    if (address === location.hash) return;
    history[replace ? "replaceState" : "pushState"](null, "", address);
    this.listeners.forEach((listener) => listener());
  }

  listen(changed: () => void): () => void {
    this.listeners.add(changed);
    addEventListener("hashchange", changed);
    addEventListener("popstate", changed);
    return () => {
      this.listeners.delete(changed);
      removeEventListener("hashchange", changed);
      removeEventListener("popstate", changed);
    };
  }
}

export class VariableRoutes implements RouteStore {
  private readonly listeners = new Set<() => void>();

  constructor(
    private route: Route = { page: "", params: {} },
    private readonly keep: (route: Route) => void = () => {},
  ) {}

  read(): Route {
    return this.route;
  }

  write(route: Route): void {
    this.route = route;
    this.keep(route);
    this.listeners.forEach((listener) => listener());
  }

  listen(changed: () => void): () => void {
    this.listeners.add(changed);
    return () => this.listeners.delete(changed);
  }
}
