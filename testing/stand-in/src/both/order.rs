//! Streams and events.

use std::ffi::c_uint;
use std::sync::Arc;

use super::both;
use crate::argument::Out;
use crate::event::{EVENTS, Event};
use crate::handles::Handle;
use crate::stream;

both! {
    cuStreamCreate, hipStreamCreateWithFlags(created: Out<Handle>, _flags: c_uint) |current| {
        created.set(stream::create(current()?)?)
    }

    cuStreamDestroy_v2, hipStreamDestroy(handle: Handle) |_| { stream::destroy(handle) }

    cuStreamQuery, hipStreamQuery(handle: Handle) |current| { stream::of(handle, current()?)?.query() }

    cuStreamSynchronize, hipStreamSynchronize(handle: Handle) |current| {
        let device = current()?;
        stream::of(handle, device)?.wait();
        device.works()
    }

    cuStreamWaitEvent, hipStreamWaitEvent(handle: Handle, event: Handle, _flags: c_uint) |current| {
        let event = EVENTS.get(event)?;
        let stream = stream::of(handle, current()?)?;
        stream.push(Box::new(move || {
            event.wait();
            Ok(())
        }));
        Ok(())
    }

    cuEventCreate, hipEventCreateWithFlags(created: Out<Handle>, _flags: c_uint) |current| {
        current()?;
        created.set(EVENTS.add(Arc::new(Event::default())))
    }

    cuEventDestroy_v2, hipEventDestroy(handle: Handle) |_| { EVENTS.remove(handle).map(|_| ()) }

    cuEventRecord, hipEventRecord(event: Handle, handle: Handle) |current| {
        let stream = stream::of(handle, current()?)?;
        EVENTS.get(event)?.record(&stream);
        Ok(())
    }

    cuEventQuery, hipEventQuery(event: Handle) |current| {
        let device = current()?;
        let event = EVENTS.get(event)?;
        event.query()?;
        // Earlier work may have broken the device meanwhile.
        device.works()
    }

    cuEventSynchronize, hipEventSynchronize(event: Handle) |current| {
        let device = current()?;
        EVENTS.get(event)?.wait();
        device.works()
    }
}
