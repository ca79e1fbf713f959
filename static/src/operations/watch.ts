// The state of the strip and the Activity page: groups with their pace, made from the store a few times a second
// (no one reads sixty figures a second), once for all who look. It also notices what ends.
import { useContext, useSyncExternalStore } from "react";
import { Listeners } from "../lib/listeners";
import { LiveContext } from "../live/hooks";
import type { Operation } from "../live/messages";
import type { LiveStore } from "../live/store";
import { ends, type End } from "./announcements";
import { groups, type Group } from "./model";
import { Paces, UNKNOWN, type Pace } from "./pace";

export interface Work {
  /** True if the feed has sent the operations; an empty list before that does not mean that there are none. */
  isKnownTotal: boolean;
  operations: ReadonlyMap<string, Operation>;
  groups: readonly Group[];
  /** By group, by job, and by part (`partKey`); what is not here has no pace. */
  paces: ReadonlyMap<string, Pace>;
}

const REST_MS = 250;
/** Rates run out when nothing comes any more; somebody has to look. */
const REFRESH_MS = 1_000;

const NOTHING: Work = { isKnownTotal: false, operations: new Map(), groups: [], paces: new Map() };

export class Watch {
  private work = NOTHING;
  private readonly paces = new Paces();
  private readonly listeners = new Set<() => void>();
  private readonly endings = new Listeners<[announcements: readonly End[]]>();
  private timer: ReturnType<typeof setTimeout> | undefined;
  private lastRefresh = 0;
  private stop: () => void = () => undefined;

  constructor(private readonly store: LiveStore) {}

  readonly read = (): Work => this.work;

  readonly subscribe = (listener: () => void): (() => void) => {
    if (this.listeners.size === 0) this.start();
    this.listeners.add(listener);
    return () => {
      this.listeners.delete(listener);
      if (this.listeners.size === 0) this.suspend();
    };
  };

  /** Calls a function with what has ended, each end once, while somebody looks. */
  readonly onEnds = this.endings.subscribe;

  private start(): void {
    this.stop = this.store.subscribe(() => this.soon());
    this.refresh();
  }

  private suspend(): void {
    this.stop();
    clearTimeout(this.timer);
    this.timer = undefined;
  }

  private soon(): void {
    if (this.store.read().operations === this.work.operations) return;
    const wait = Math.max(0, this.lastRefresh + REST_MS - performance.now());
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(), wait);
  }

  private refresh(): void {
    const now = (this.lastRefresh = performance.now());
    const { operations, operationsSeq } = this.store.read();
    const previous = this.work.isKnownTotal ? this.work.operations : null;
    this.paces.observe(operations, now);
    const previousGroups = new Map(this.work.groups.map((group) => [group.id, group]));
    const nextGroups = groups(operations.values(), previousGroups);
    this.work = { isKnownTotal: operationsSeq !== null, operations, groups: nextGroups, paces: this.measured(nextGroups, now) };
    for (const listener of this.listeners) listener();
    const announcements = ends(previous, operations);
    if (announcements.length > 0) this.endings.notify(announcements);
    if (nextGroups.some((group) => group.active.length > 0)) this.timer = setTimeout(() => this.refresh(), REFRESH_MS);
  }

  private measured(currentGroups: readonly Group[], now: number): ReadonlyMap<string, Pace> {
    const paces = new Map<string, Pace>();
    for (const group of currentGroups) {
      paces.set(group.id, this.paces.ofGroup(group, now));
      for (const operation of group.active) {
        const pace = this.paces.of(operation, now);
        if (pace !== UNKNOWN) paces.set(operation.jobID, pace);
        for (const [key, part] of this.paces.ofTargets(operation, now)) if (part !== UNKNOWN) paces.set(key, part);
      }
    }
    return paces;
  }
}

const watches = new WeakMap<LiveStore, Watch>();

export function watchOf(store: LiveStore): Watch {
  const watch = watches.get(store) ?? new Watch(store);
  watches.set(store, watch);
  return watch;
}

export function useWatch(): Watch {
  return watchOf(useContext(LiveContext));
}

/** Groups, operations and paces as of a moment ago. */
export function useWork(): Work {
  const watch = useWatch();
  return useSyncExternalStore(watch.subscribe, watch.read);
}
