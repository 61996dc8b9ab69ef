/* A driver library with the names of NVML, for tests without a GPU. The file named by FAKE_GPUS holds its answers,
   one line a GPU: uuid, PCI bus, bytes used, bytes in all, MHz, the mask of reasons, the pid of one process or 0, the
   energy in mJ and the power in mW, each 0 where the GPU does not know it. A line whose uuid begins with MIG- is a MIG
   device of the GPU above it, which has no clocks of its own. The file named by FAKE_HEALTH holds lines of
   a uuid, the name of a fact and its number; a fact without a line is not supported. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
struct gpu { char uuid[64], bus[32]; unsigned long long used, total, mask, energy; unsigned mhz, pid, power; };
static struct gpu now;
static int look(const char *uuid, int number) {
    FILE *file = fopen(getenv("FAKE_GPUS"), "r");
    int found = 0, at = 0;
    while (file && !found && fscanf(file, "%63s %31s %llu %llu %u %llu %u %llu %u", now.uuid, now.bus, &now.used,
                                    &now.total, &now.mhz, &now.mask, &now.pid, &now.energy, &now.power) == 9)
        found = uuid ? strcmp(now.uuid, uuid) == 0 : strncmp(now.uuid, "MIG-", 4) && at++ == number;
    if (file) fclose(file);
    return found;
}
int nvmlInitWithFlags(unsigned flags) {
    if (getenv("FAKE_HANG")) sleep(60);
    return getenv("FAKE_FAILURE") ? 9 : 0;
}
const char *nvmlErrorString(int code) { return "error"; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    if (getenv("FAKE_FAILURE")) return 1;
    for (*count = 0; look(NULL, *count); ++*count);
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **handle) {
    if (!look(NULL, number)) return 6;
    *handle = strdup(now.uuid);
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (!look(uuid, 0)) return 6;
    *handle = strdup(uuid);
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **mig) {
    FILE *file = fopen(getenv("FAKE_GPUS"), "r");
    char line[512], uuid[64];
    int inside = 0, found = 0;
    while (file && !found && fgets(line, sizeof line, file) && sscanf(line, "%63s", uuid) == 1) {
        if (strncmp(uuid, "MIG-", 4)) inside = !strcmp(uuid, handle);
        else if (inside) found = index-- == 0;
    }
    if (file) fclose(file);
    if (!found) return 6;
    *mig = strdup(uuid);
    return 0;
}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) { strncpy(uuid, handle, length); return 0; }
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *out) {
    if (!look(handle, 0)) return 15;
    memset(out, 0, sizeof *out);
    strcpy(out->bus_id, now.bus);
    return 0;
}
int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    if (pid > 4194304) return 6;
    strncpy(name, "/usr/bin/python", length);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *out) {
    if (!look(handle, 0)) return 15;
    out[0] = now.total; out[1] = now.total - now.used; out[2] = now.used;
    return 0;
}
int nvmlDeviceGetClockInfo(void *handle, unsigned kind, unsigned *out) {
    if (!strncmp(handle, "MIG-", 4) || !look(handle, 0) || kind != 1) return 2;
    *out = now.mhz;
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *out) {
    if (!look(handle, 0)) return 15;
    *out = now.mask;
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *out) {
    if (!look(handle, 0) || !now.energy) return 3;
    *out = now.energy;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *out) {
    if (!look(handle, 0) || !now.power) return 3;
    *out = now.power;
    return 0;
}
static int fact(const char *uuid, const char *name, unsigned long long *out) {
    char whose[64], which[64];
    FILE *file = getenv("FAKE_HEALTH") ? fopen(getenv("FAKE_HEALTH"), "r") : NULL;
    int found = 0;
    while (file && !found && fscanf(file, "%63s %63s %llu", whose, which, out) == 3)
        found = !strcmp(whose, uuid) && !strcmp(which, name);
    if (file) fclose(file);
    return found ? 0 : 3;
}
static int small_fact(const char *uuid, const char *name, unsigned *out) {
    unsigned long long number = 0;
    int code = fact(uuid, name, &number);
    *out = number;
    return code;
}
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *out) {
    return kind != 1 ? 2 : fact(handle, counter ? "ecc_in_life" : "ecc", out);
}
int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *lost, unsigned *pending, unsigned *failed) {
    *corrected = *lost = 0;
    return small_fact(handle, "remap_pending", pending) | small_fact(handle, "remap_failed", failed);
}
int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active) {
    unsigned links = 0, code = small_fact(handle, "links", &links);
    *active = 1;
    return code ? code : link < links ? 0 : 2;
}
int nvmlDeviceGetNvLinkErrorCounter(void *handle, unsigned link, int counter, unsigned long long *out) {
    char name[64];
    snprintf(name, sizeof name, "link%u_error%d", link, counter);
    return fact(handle, name, out);
}
int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *out) { return small_fact(handle, "power", out); }
int nvmlDeviceGetPowerManagementDefaultLimit(void *handle, unsigned *out) {
    return small_fact(handle, "default_power", out);
}
struct process { unsigned pid; unsigned long long used; unsigned gpu, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *out) {
    if (!look(handle, 0)) return 15;
    if (!now.pid) { *count = 0; return 0; }
    if (*count < 1) { *count = 1; return 7; }
    *count = 1;
    out[0].pid = now.pid; out[0].used = now.used ? now.used : ~0ULL; out[0].gpu = out[0].compute = 0;
    return 0;
}
